"""Scripts that show on two ranks what releases get wrong: `ds-patches prove`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

from ds_patches.core import files

_HERE = Path(__file__).parent
_OFFLOADED: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
_BF16 = {"bf16": {"enabled": True}}
_SUMS = _BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}
_REDUCED = {"reduce_scatter": False}
_PREFETCHED = {"stage3_prefetch_bucket_size": 600, "stage3_max_live_parameters": 10**9}
_HOST = {"zero_force_ds_cpu_optimizer": False}
_UNPRINTED = {"steps_per_print": 1000}  # without it a pipeline fails to 0.16.4
_FP16 = ("cuda", "DeepSpeed refuses fp16 on a CPU")
#: The throughput timer waits for the device in each step.
_UNTIMED = {"timers": {"throughput": {"enabled": False, "synchronized": False}}}


def _fp16(**settings: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **settings}}


@dataclass(frozen=True)
class Proof:
    """A function of scripts.py, and the configuration besides.

    stage: where it is not the row's. only: the device that shows it, and why the other does not.
    row: the name of the proof that its row has, if that is another one.
    """

    script: str
    zero: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    stage: int | None = None
    only: tuple[str, ...] = ()
    row: str = ""


PROOFS = {
    "adapters": Proof("adapters"),
    "batch-size": Proof("batch_size", stage=2),
    "bf16": Proof("one_backward", {}, _BF16),
    "bf16-first": Proof("decayed", {}, _BF16),
    "block": Proof("block"),
    "buffers": Proof("fp32_buffers", {}, _BF16),
    "buffers-init": Proof("buffers_in_init", {}, _BF16),
    "cached-loss": Proof("cached_loss"),
    "cosine": Proof("cosine", stage=2),
    "experts": Proof("experts"),
    "forwards-first": Proof("forwards_first"),
    "fp16": Proof("one_backward", {}, _fp16(loss_scale=128), only=_FP16),
    "fp16-first": Proof("decayed", {}, _fp16(loss_scale=128), only=_FP16),
    "fp16-fused": Proof("fused_adam", {}, _fp16(loss_scale=128), only=_FP16),
    "fp16-scale": Proof(
        "one_backward", {}, _fp16(initial_scale_power=7, loss_scale_window=2), only=_FP16
    ),
    "gan": Proof("gan"),
    "gan-3": Proof("gan"),
    "gradient-penalty": Proof("gradient_penalty"),
    "hpz": Proof("loaded", {"zero_hpz_partition_size": 2}),
    "inference": Proof("inference_mode", _PREFETCHED),
    "late-step": Proof("late_step", {}, _UNTIMED, only=("cuda", "a CPU has no streams")),
    "micro-steps": Proof("micro_steps"),
    "micro-steps-cpuadam": Proof(
        "cpu_adam",
        _OFFLOADED,
        only=("cuda", "a CPU has no pinned memory"),
        row="micro-steps-offload",
    ),
    "micro-steps-offload": Proof("micro_steps", _OFFLOADED, _HOST),
    "module": Proof("around_the_engine"),
    "module-3": Proof("around_the_engine"),
    "muon": Proof("muon"),
    "muon-0": Proof("muon"),
    "muon-losses": Proof("muon_two_losses"),
    "muon-micro-steps": Proof("muon_micro_steps", _REDUCED),
    "muon-shapes": Proof("muon", _REDUCED, only=("cpu", "NCCL gathers several shapes")),
    "no-dimensions": Proof("no_dimensions"),
    "no-sync": Proof("no_sync", stage=2),
    "other-parameters": Proof("other_parameters", {"overlap_comm": True}),
    "outputs": Proof("outputs"),
    "outputs-plain": Proof("outputs_plain"),
    "own-checkpointing": Proof("own_checkpointing", stage=2),
    "penalty": Proof("penalty"),
    "pipeline": Proof("pipeline", {}, _UNPRINTED),
    "pipeline-0": Proof("pipeline", stage=0),
    "retained": Proof("two_backwards"),
    "scattered": Proof(
        "one_backward", {"contiguous_gradients": False}, only=("cpu", "it averages on GPUs")
    ),
    "second-backward": Proof("two_backwards"),
    "second-backward-offload": Proof("two_backwards", _OFFLOADED, _HOST),
    "skipped-frame": Proof(
        "skipped_frame",
        {},
        {"compile": {"deepcompile": True}},
        only=("cuda", "DeepCompile takes one"),
    ),
    "sums": Proof("one_backward", {}, _SUMS),
    "sums-offload": Proof("one_backward", _OFFLOADED, _SUMS | _HOST),
    "tiled": Proof("tiled"),
    "unused": Proof("unused_parameter"),
    "unused-offload": Proof("unused_parameter", _OFFLOADED, _HOST),
    "warmup": Proof("warmup", stage=2),
    "weights-by-hand": Proof("by_hand"),
    "weights-gathered": Proof("by_hand"),
}


def compose(name: str, stage: int, title: str) -> str:
    """Return a whole reproducer: the frame, with a script and its configuration in it."""
    proof = PROOFS[name]
    zero = {"stage": stage, **proof.zero}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        **proof.settings,
    }
    return framed(files.text(_HERE / "scripts.py"), proof.script, config, title)


def framed(source: str, script: str, config: Mapping[str, Any], title: str) -> str:
    """Return the frame with a function of a source, and whatever of the source that uses."""
    frame = files.text(_HERE / "frame.py").replace("  # noqa: F401", "")
    tree = ast.parse(source)
    whole = {n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    used = dict.fromkeys(_used(whole[script], whole))
    body = "\n\n".join(ast.get_source_segment(source, one) or "" for one in used)
    words = {*re.findall(r"\w+", body)}
    imports = []
    for one in tree.body:
        if isinstance(one, (ast.Import, ast.ImportFrom)):
            one.names = [name for name in one.names if name.name in words]
            line = ast.unparse(one) if one.names else "ds_patches"
            imports += [f"{line}\n"] * ("ds_patches" not in line and line not in frame)
    settings = "\n    ".join(wrap(f"CONFIG = {dict(config)}".replace("'", '"'), 95))
    parts = {
        "TITLE": "\n".join(wrap(title, 99)),
        "import os\nimport sys\n\n": f"{''.join(imports)}import os\nimport sys\n",
        "CONFIG = {}": settings,
        'def script(start, net, data):\n    """A function of scripts.py stands here."""': body,
        "in script(": f"in {script}(",
    }
    for place, text in parts.items():
        frame = frame.replace(place, text, 1)
    return re.sub(r"\n\n+(    def )", r"\n\1", frame.replace("\n\n\n", "\n\n"))


def _used(node: ast.AST, whole: Mapping[str, ast.AST]) -> Iterator[ast.AST]:
    """Yield what a definition needs of its source, and it."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and one.id in whole:
            yield from _used(whole[one.id], whole)
    yield node
