"""What stock DeepSpeed can do, by release: so that its defects are not taken for ours."""

from __future__ import annotations

import pytest

from tests.zero3_retain.releases import (
    LOSES_MICRO_STEPS,
    RELEASE,
    TORCH_STYLE,
    Version,
    needs_torch_style,
)

__all__ = [
    "LOSES_MICRO_STEPS",
    "NATIVE",
    "NON_CONTIGUOUS_IS_WRONG",
    "RELEASE",
    "STEPS_WITH_LOCAL_SUMS",
    "TORCH_STYLE",
    "Version",
    "needs_non_contiguous",
    "needs_torch_style",
]

#: The engine has a coalesce_grad_reduction of its own.
NATIVE = Version("0.19.1") <= RELEASE

#: With ``contiguous_gradients`` off, ZeRO-1/2 on CPU sorts gradients by the names of their types,
#: finds none of them, and reduces nothing; with a single backward, before any patch.
NON_CONTIGUOUS_IS_WRONG = Version("0.19.8") > RELEASE


#: ZeRO-1 with an offloaded optimizer, a low precision model and fp32 sums reduces a copy of each
#: gradient and steps with the local one; with a single backward, before any patch.
STEPS_WITH_LOCAL_SUMS = Version("0.19.8") > RELEASE


def needs_non_contiguous() -> None:
    if NON_CONTIGUOUS_IS_WRONG:
        pytest.skip(f"stock {RELEASE} reduces nothing here on CPU, with a single backward")
