"""What releases of DeepSpeed get wrong, in ordinary scripts, and what helps.

Data only: the table of the site, `doctor` and `explain` are made of it. What is said besides, and
the wording of messages, is in docs/troubleshooting.md, in the section that a row names.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The newest release that was looked at. "No release is right" means none up to this one.
TESTED = "0.19.8"
OLDEST = "0.16.0"


@dataclass(frozen=True)
class Symptom:
    """A script, what it comes to on stock DeepSpeed, and where.

    script, outcome: Markdown; a message of DeepSpeed's or PyTorch's stands in backticks.
    stages: the ZeRO stages.
    first, right: the first release that is wrong, and the first that is right again; None if no
        release is.
    patch: the one that cures it, or nothing.
    add: what the script needs besides `ds_patches.apply_all()`; without a patch, instead of it.
    anchor: of its section in docs/troubleshooting.md.
    needs: what brings it about: settings, by their names in commands/configuration.py, and
        "script" where the script has to do something besides.
    """

    script: str
    outcome: str
    stages: tuple[int, ...]
    first: str
    right: str | None
    patch: str
    add: str = ""
    anchor: str = ""
    needs: str = "script"


_ALL, _FLAT, _3 = (1, 2, 3), (1, 2), (3,)
_BLOCK = "`with engine.coalesce_grad_reduction():`"
_LAST = "only the last backward counts"
_REDUCED = "`has already been reduced. Gradient computed twice for this partition`"
_GAN = "two engines in one step, as of a GAN"
_OLD = "it is stepped with its previous gradient"

# A table, laid out by hand.
# fmt: off
CURED = (
    Symptom("two backwards over one forward",
            "`The size of tensor a (0) must match the size of tensor b (64)`",
            _3, "0.16.0", None, "zero3_retain", anchor="size-of-tensor"),
    Symptom("a gradient penalty (`create_graph=True`)",
            "`mat2 must be a matrix`, or wrong gradients",
            _3, "0.16.0", None, "zero3_retain", anchor="gradient-penalty"),
    Symptom("a second backward before `engine.step()`",
            "`'NoneType' object is not iterable`",
            _FLAT, "0.17.6", "0.18.3", "accumulation", anchor="none-not-iterable"),
    Symptom("a second backward before `engine.step()`", _LAST,
            _FLAT, "0.18.3", None, "accumulation", anchor="last-loss"),
    Symptom("a second backward before `engine.step()`, optimizer on the CPU", _LAST,
            _FLAT, "0.16.0", None, "accumulation", anchor="last-loss", needs="offload script"),
    Symptom("two forwards, then their backwards, before one `engine.step()`", _LAST,
            _3, "0.18.5", None, "accumulation", anchor="last-loss"),
    Symptom("gradient accumulation",
            "only the last micro step counts",
            (2,), "0.17.6", "0.18.3", "accumulation", anchor="micro-steps", needs="accumulation"),
    Symptom("three micro steps or more, or a boundary set by hand, optimizer on the CPU",
            "micro steps in the middle are dropped", (2,), "0.16.0", "0.19.0", "accumulation",
            anchor="micro-steps", needs="accumulation offload"),
    Symptom("a parameter that a step does not use, as an expert that no token is sent to", _OLD,
            _3, "0.16.0", None, "accumulation", anchor="stale-gradient"),
    Symptom("a parameter that a step does not use, optimizer on the CPU", _OLD,
            _FLAT, "0.16.0", None, "accumulation", anchor="stale-gradient", needs="offload script"),
    Symptom("`overlap_comm`, and a parameter that the last micro step does not use",
            "its gradient is lost", (1,), "0.16.0", None, "accumulation", anchor="micro-steps",
            needs="accumulation overlap script"),
    Symptom("`engine(x)` and `engine.module(x)` in one step",
            "wrong gradients",
            _FLAT, "0.18.3", "0.19.6", "accumulation", anchor="other-gradients"),
    Symptom("`engine(x)` and `engine.module(x)` in one step",
            "wrong gradients",
            _3, "0.18.3", None, "accumulation", anchor="other-gradients"),
    Symptom("`scale_wrt_gas=False`, which Accelerate passes",
            "gradients are divided by the micro steps", _ALL, "0.18.3", "0.18.4", "accumulation",
            anchor="other-gradients", needs="accumulation script"),
    Symptom("`torch.autograd.grad` at an output",
            "its result is divided by the micro steps, or `list index out of range`",
            _ALL, "0.18.3", None, "accumulation", anchor="other-gradients"),
    Symptom("bf16 with fp32 sums",
            "the last micro step is not averaged over the ranks", (1,), "0.18.3", "0.19.0",
            "accumulation", anchor="not-averaged", needs="sums"),
    Symptom("bf16 with fp32 sums, optimizer on the CPU",
            "no gradient is averaged over the ranks", (1,), "0.16.0", "0.19.8",
            "accumulation", anchor="not-averaged", needs="sums offload"),
    Symptom("CPU ranks without `contiguous_gradients`",
            "no gradient is averaged over the ranks", _FLAT, "0.16.0", "0.19.8",
            "accumulation", anchor="not-averaged", needs="scattered script"),
    Symptom("ranks that use different parameters in a step: experts of a MoE model such as "
            "Mixtral, a tower of one modality",
            "gradients of different parameters are added to one another, or a hang",
            _FLAT, "0.16.0", None, "accumulation", anchor="ranks-differ"),
    Symptom("bf16 without ZeRO", "the loss hardly falls; to 0.18.2 older gradients are added",
            (0,), "0.17.6", "0.18.6", "accumulation", anchor="bf16-without-zero", needs="bf16"),
    Symptom("a pipeline (`PipelineModule`) with micro steps", "they are added up, not averaged",
            (0, 1), "0.16.0", "0.18.3", "accumulation", anchor="pipelines",
            needs="pipeline accumulation"),
    Symptom("a pipeline of two stages or more with micro steps",
            "all stages but the last hardly train", (0, 1), "0.18.3", "0.19.3", "accumulation",
            anchor="pipelines", needs="pipeline accumulation"),
    Symptom("a pipeline of two stages or more without ZeRO, or with fp16",
            "`Direct calls to tensor.backward() are not supported`; `Loss scaling is required`",
            (0, 1), "0.18.3", "0.18.5", "accumulation", anchor="direct-calls", needs="pipeline"),
    Symptom("a model of many parameters", "a backward takes up to 2.5 times as long",
            _ALL, "0.18.5", "0.18.7", "accumulation", anchor="counts-again", needs=""),
    Symptom("any backward, with torch 2.4 or older",
            "`'NoneType' object has no attribute 'next_functions'`",
            _ALL, "0.18.3", "0.18.7", "accumulation", anchor="inference-tensors"),
    Symptom(_GAN, _REDUCED, (2,), "0.16.5", "0.18.3", "accumulation", anchor="reduced-twice"),
    Symptom(_GAN, _REDUCED, (2,), "0.19.6", None, "accumulation", anchor="reduced-twice"),
    Symptom(_GAN, "wrong gradients", _3, "0.18.3", "0.19.6", "accumulation",
            anchor="other-gradients"),
    Symptom("two engines in one step, one of them frozen meanwhile",
            "`list index out of range`, or wrong gradients at ZeRO-3",
            _ALL, "0.18.5", "0.19.6", "accumulation", anchor="other-gradients"),
    Symptom("a backward inside another, as in `CachedMultipleNegativesRankingLoss`", _REDUCED,
            _FLAT, "0.16.0", None, "coalesce", anchor="reduced-twice"),
    Symptom("`engine.no_sync()`, `accelerator.accumulate()`",
            "`no_sync context manager is incompatible with gradient partitioning logic of "
            "ZeRO stage 2`", (2, 3), "0.16.0", None, "coalesce", anchor="no-sync"),
    Symptom("GradCache, or N backwards and one reduction",
            "`'DeepSpeedEngine' object has no attribute 'coalesce_grad_reduction'`",
            _ALL, "0.16.0", "0.19.1", "coalesce", add=_BLOCK, anchor="no-block"),
    Symptom("an exception in `coalesce_grad_reduction()`",
            "half of the block is stepped, or other ranks hang",
            _ALL, "0.19.1", None, "coalesce", anchor="half-a-block"),
    Symptom("DeepCompile, and a frame that Dynamo skips", "`'weight' must be 2-D`",
            _3, "0.16.6", None, "dc_fallback", anchor="weight-2d", needs="deepcompile script"),
    Symptom("DeepCompile, and a frame that Dynamo skips", "its parameters do not train", _3,
            "0.19.3", None, "dc_fallback", anchor="does-not-train", needs="deepcompile script"),
    Symptom("DeepCompile, and several forwards or backwards before one step", "only one counts", _3,
            "0.16.6", None, "dc_fallback", anchor="does-not-train", needs="deepcompile script"),
    Symptom("a trained module beside its frozen original (PEFT's `modules_to_save`)",
            "`'Linear' object has no attribute 'ds_grads_remaining'`",
            _3, "0.16.5", "0.19.3", "zero3_retain", anchor="grads-remaining"),
    Symptom("a frozen model with adapters (LoRA), `checkpoint(use_reentrant=False)`",
            "`Recomputed values for the following tensors have different metadata`",
            _3, "0.16.0", "0.19.3", "zero3_retain", anchor="recomputed-values"),
    Symptom("a frozen model with adapters (LoRA), `checkpoint(use_reentrant=True)`",
            "all that is frozen stays gathered in a backward",
            _3, "0.19.3", None, "zero3_retain", anchor="recomputed-values"),
    Symptom("an evaluation under `torch.inference_mode()` between training steps",
            "`Inference tensors cannot be saved for backward`, or "
            "`'NoneType' object has no attribute 'next_functions'`",
            _3, "0.16.0", None, "zero3_hooks", anchor="inference-tensors"),
    Symptom("generation with ZeRO-3's hooks removed and added again, as by TRL",
            "`pop from an empty deque`",
            _3, "0.16.0", "0.19.2", "zero3_hooks", anchor="empty-deque"),
    Symptom("parameters of several dtypes gathered together, as adapters under `zero.Init`",
            "`output tensor must have the same type as input tensor`",
            _3, "0.16.0", "0.19.3", "zero3_hooks", anchor="several-dtypes"),
    Symptom("`overlap_comm` on GPUs",
            "NaN, or other numbers in each run",
            _ALL, "0.16.0", None, "stream_safety", anchor="streams-race", needs="overlap"),
)
SETTINGS = (
    Symptom("no `gradient_clipping` in the configuration",
            "gradients are clipped to 1.0: a changed default, no defect", _ALL, "0.19.3", None, "",
            add='`"gradient_clipping": 0.0`', anchor="clipped", needs="unclipped"),
    Symptom("a section of the configuration that was removed, such as `nebula`",
            "`DeepSpeedConfigError: Nebula checkpointing has been removed`", (0, *_ALL), "0.19.7",
            None, "", add="take the section out", anchor="removed-section", needs="first"),
    Symptom("a section of the configuration that was removed, such as `elasticity`",
            "`DeepSpeedConfigError: Elastic training has been removed`", (0, *_ALL), "0.19.8", None,
            "", add="take the section out", anchor="removed-section", needs="removed"),
    Symptom("small parameters, ranks on CPU", "weights may become infinite", _3, "0.16.0", "0.19.8",
            "", add='`"stage3_param_persistence_threshold": 0`', anchor="late-gathers",
            needs="script"),
)
#: What no patch cures. A row that gets its patch moves up to CURED.
NOT_CURED = (
    Symptom("experts, or other parts that ranks do not all use",
            "the job hangs at the first step, or a collective does not match", _3, "0.16.0", None,
            "", add="`set_z3_leaf_modules`", anchor="experts-hang"),
    Symptom("a plain `loss.backward()` without ZeRO",
            "`Direct calls to tensor.backward() are not supported in this configuration`",
            (0,), "0.18.4", None, "", add="`engine.backward(loss)`", anchor="direct-calls"),
    Symptom("a plain `loss.backward()`", _REDUCED, _FLAT, "0.16.0", "0.18.3", "",
            add="`engine.backward(loss)`", anchor="reduced-twice"),
    Symptom("`engine.scale(loss).backward()`", "`'DeepSpeedEngine' object has no attribute "
            "'scale'`", _ALL, "0.16.0", "0.18.3", "", add="`engine.backward(loss)`",
            anchor="no-scale"),
    Symptom("`GatheredParameters` in a forward, or after one that raised",
            "`Cannot partition a param in flight`", _3, "0.16.0", None, "",
            add='`"stage3_prefetch_bucket_size": 0`', anchor="inflight"),
    Symptom("training that goes on after a gather raised, out of memory say",
            "`'status': 'INFLIGHT'`", _3, "0.16.0", None, "", add="a restart from a checkpoint",
            anchor="inflight"),
    Symptom("several CPU ranks", "`Output 0 of Split is a view and is being modified inplace`",
            _FLAT, "0.18.7", "0.19.0", "", anchor="split-view"),
)
# fmt: on
SYMPTOMS = CURED + SETTINGS + NOT_CURED
