"""What stock DeepSpeed can do, by release: so that its defects are not taken for ours."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

RELEASE = Version(version("deepspeed"))

TORCH_STYLE = Version("0.18.3") <= RELEASE

STYLES = ["engine", "scale", "torch"] if TORCH_STYLE else ["engine"]

#: ZeRO-2 forgets all but the last micro step of a gradient accumulation (issue-free upstream; the
#: epilogue tests ``averaged_gradients`` where it means ``all_grad_tensors``).
LOSES_MICRO_STEPS = Version("0.17.6") <= RELEASE <= Version("0.18.2")

#: ZeRO-1/2 with ``contiguous_gradients`` off: wrong with a single backward, before any patch.
NON_CONTIGUOUS_IS_WRONG = Version("0.18.3") > RELEASE

#: ZeRO-1 with bf16 parameters and fp32 gradients: the boundary backward is never reduced (0.18.5 to
#: 0.18.9), or nothing trains at all (0.18.3 and 0.18.4); with a single backward, before any patch.
BF16_OPTIMIZER_IS_WRONG = Version("0.18.3") <= RELEASE <= Version("0.18.9")

#: Models built outside ``zero.Init`` get DeepSpeed's Linear too, which saves no gathered weight.
LINEAR_SAVES_NO_WEIGHT = Version("0.19.4") <= RELEASE


def stock_sums_over(stage: int) -> bool:
    """Whether stock adds up several backwards over one forward at stages 1 and 2."""
    return stage < 3 and Version("0.17.5") >= RELEASE


def needs_torch_style(style: str) -> None:
    if style not in STYLES:
        pytest.skip(f"DeepSpeed {RELEASE} has no {style}-style backward (0.18.3 and later have)")
