"""The ordinary scripts that releases of DeepSpeed get wrong, and the patch that cures each.

Data only. The tables of the README and of the site's first page are made of it, and so is what
`doctor` says of the installed release.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The newest release that was looked at. "No release is right" means none up to this one.
TESTED = "0.19.8"
_BLOCK = "`with engine.coalesce_grad_reduction():`"


@dataclass(frozen=True)
class Symptom:
    """A script, what it comes to on stock DeepSpeed, and where.

    script, outcome: Markdown; a message of DeepSpeed's or PyTorch's stands in backticks.
    stages: the ZeRO stages.
    first, right: the first release that is wrong, and the first that is right again; None if no
        release is.
    patch: the one that cures it, or nothing.
    add: what the script needs besides `ds_patches.apply_all()`; without a patch, instead of it.
    warned: the releases, of those that are wrong, in which the patch only warns.
    anchor: of its section in docs/troubleshooting.md.
    """

    script: str
    outcome: str
    stages: tuple[int, ...]
    first: str
    right: str | None
    patch: str
    add: str = ""
    warned: str = ""
    anchor: str = ""


_ALL, _FLAT = (1, 2, 3), (1, 2)
_LAST = "only the last backward counts"

SYMPTOMS = (
    Symptom(
        "two backwards over one forward",
        "`The size of tensor a (0) must match the size of tensor b (64)`",
        (3,),
        "0.16.0",
        None,
        "zero3_retain",
        anchor="size-of-tensor",
    ),
    Symptom(
        "PEFT's `modules_to_save`",
        "`'Linear' object has no attribute 'ds_grads_remaining'`",
        (3,),
        "0.16.0",
        "0.19.3",
        "zero3_retain",
        anchor="grads-remaining",
    ),
    Symptom(
        "a gradient penalty (`create_graph=True`)",
        "`mat2 must be a matrix`, or wrong gradients",
        (3,),
        "0.16.0",
        None,
        "zero3_retain",
        anchor="gradient-penalty",
    ),
    Symptom(
        "a second backward before `engine.step()`",
        f"`'NoneType' object is not iterable`; from 0.18.3 {_LAST}",
        _FLAT,
        "0.17.6",
        None,
        "accumulation",
        anchor="last-loss",
    ),
    Symptom(
        "a second backward before `engine.step()`, optimizer on the CPU",
        _LAST,
        _FLAT,
        "0.16.0",
        None,
        "accumulation",
        anchor="last-loss",
    ),
    Symptom(
        "two forwards, then their backwards, before one `engine.step()`",
        _LAST,
        (3,),
        "0.18.5",
        None,
        "accumulation",
        anchor="last-loss",
    ),
    Symptom(
        "gradient accumulation",
        "only the last micro step counts",
        (2,),
        "0.17.6",
        "0.18.3",
        "accumulation",
        anchor="micro-steps",
    ),
    Symptom(
        "three micro steps or more, or a boundary set by hand, optimizer on the CPU",
        "micro steps in the middle are dropped",
        (2,),
        "0.16.0",
        "0.19.0",
        "accumulation",
        anchor="micro-steps",
    ),
    Symptom(
        "a parameter that a step does not use, as an expert of a MoE layer",
        "it is stepped with its previous gradient",
        (3,),
        "0.16.0",
        None,
        "accumulation",
        anchor="stale-gradient",
    ),
    Symptom(
        "a parameter that a step does not use, optimizer on the CPU",
        "it is stepped with its previous gradient",
        _FLAT,
        "0.16.0",
        None,
        "accumulation",
        anchor="stale-gradient",
    ),
    Symptom(
        "`overlap_comm`, and a parameter that the last micro step does not use",
        "its gradient is lost",
        (1,),
        "0.16.0",
        None,
        "accumulation",
        anchor="micro-steps",
    ),
    Symptom(
        "`engine(x)` and `engine.module(x)` in one step",
        "wrong gradients",
        _FLAT,
        "0.18.3",
        "0.19.6",
        "accumulation",
        anchor="other-gradients",
    ),
    Symptom(
        "`engine(x)` and `engine.module(x)` in one step",
        "wrong gradients",
        (3,),
        "0.18.3",
        None,
        "accumulation",
        anchor="other-gradients",
    ),
    Symptom(
        "`scale_wrt_gas=False`, which Accelerate passes",
        "gradients are divided by the micro steps",
        _ALL,
        "0.18.3",
        "0.18.4",
        "accumulation",
        anchor="other-gradients",
    ),
    Symptom(
        "`torch.autograd.grad` at an output",
        "its result is divided by the micro steps, or `list index out of range`",
        _ALL,
        "0.18.3",
        None,
        "accumulation",
        anchor="other-gradients",
    ),
    Symptom(
        "bf16 with fp32 sums",
        "the last micro step is not averaged over the ranks",
        (1,),
        "0.18.3",
        "0.19.0",
        "accumulation",
        warned="<=0.18.4",
        anchor="not-averaged",
    ),
    Symptom(
        "bf16 with fp32 sums, optimizer on the CPU",
        "no gradient is averaged over the ranks",
        (1,),
        "0.16.0",
        "0.19.8",
        "accumulation",
        anchor="not-averaged",
    ),
    Symptom(
        "CPU ranks without `contiguous_gradients`",
        "no gradient is averaged over the ranks",
        _FLAT,
        "0.16.0",
        "0.19.8",
        "accumulation",
        anchor="not-averaged",
    ),
    Symptom(
        "`engine.no_sync()`, `accelerator.accumulate()`",
        "`no_sync context manager is incompatible with gradient partitioning logic of "
        "ZeRO stage 2`",
        (2, 3),
        "0.16.0",
        None,
        "coalesce",
        anchor="no-sync",
    ),
    Symptom(
        "GradCache, or N backwards and one reduction",
        "`'DeepSpeedEngine' object has no attribute 'coalesce_grad_reduction'`",
        _ALL,
        "0.16.0",
        "0.19.1",
        "coalesce",
        add=_BLOCK,
        anchor="no-block",
    ),
    Symptom(
        "an exception in `coalesce_grad_reduction()`",
        "half of the block is stepped, or other ranks hang",
        _ALL,
        "0.19.1",
        None,
        "coalesce",
        anchor="no-block",
    ),
    Symptom(
        "DeepCompile, and a frame that Dynamo skips",
        "`'weight' must be 2-D`",
        (3,),
        "0.16.6",
        None,
        "dc_fallback",
        anchor="weight-2d",
    ),
    Symptom(
        "DeepCompile, and a frame that Dynamo skips",
        "its parameters do not train",
        (3,),
        "0.19.3",
        None,
        "dc_fallback",
        anchor="does-not-train",
    ),
    Symptom(
        "DeepCompile, and several forwards or backwards before one step",
        "only one counts",
        (3,),
        "0.16.6",
        None,
        "dc_fallback",
        anchor="does-not-train",
    ),
    Symptom(
        "an evaluation under `torch.inference_mode()` between training steps",
        "`Inference tensors cannot be saved for backward`, or "
        "`'NoneType' object has no attribute 'next_functions'`",
        (3,),
        "0.16.0",
        None,
        "zero3_hooks",
        anchor="inference-tensors",
    ),
    Symptom(
        "generation with ZeRO-3's hooks removed and added again, as by TRL",
        "`pop from an empty deque`",
        (3,),
        "0.16.0",
        "0.19.2",
        "zero3_hooks",
        anchor="empty-deque",
    ),
    Symptom(
        "parameters of several dtypes gathered together, as adapters under `zero.Init`",
        "`output tensor must have the same type as input tensor`",
        (3,),
        "0.16.0",
        "0.19.3",
        "zero3_hooks",
        anchor="several-dtypes",
    ),
    Symptom(
        "a frozen model with adapters (LoRA), `checkpoint(use_reentrant=False)`",
        "`Recomputed values for the following tensors have different metadata`",
        (3,),
        "0.16.0",
        "0.19.3",
        "zero3_retain",
        anchor="recomputed-values",
    ),
    Symptom(
        "a frozen model with adapters (LoRA), `checkpoint(use_reentrant=True)`",
        "all that is frozen stays gathered in a backward",
        (3,),
        "0.19.3",
        None,
        "zero3_retain",
        anchor="recomputed-values",
    ),
    Symptom(
        "`overlap_comm` on GPUs",
        "NaN, or other numbers in each run",
        _ALL,
        "0.16.0",
        None,
        "stream_safety",
        anchor="streams-race",
    ),
    Symptom(
        "any backward, with many parameters",
        "Python calls grow with their square: at 128 parameters it takes 2.5 times as long",
        _ALL,
        "0.18.5",
        "0.18.7",
        "",
        add="DeepSpeed 0.18.7",
        anchor="counts-again",
    ),
    Symptom(
        "any backward, with torch 2.4 or older",
        "`'NoneType' object has no attribute 'next_functions'`",
        _ALL,
        "0.18.3",
        "0.18.7",
        "",
        add="torch 2.5, or DeepSpeed 0.18.7",
        anchor="counts-again",
    ),
    Symptom(
        "no `gradient_clipping` in the configuration",
        "gradients are clipped to 1.0: a changed default, no defect",
        _ALL,
        "0.19.3",
        None,
        "",
        add='`"gradient_clipping": 0.0`',
        anchor="clipped",
    ),
)
