"""Muon, whose step is no sum of its gradients': what is orthogonalised has to be the whole one."""

from __future__ import annotations

from typing import Any

from tests.scripts.declared import ALL_RIGHT, script
from tests.scripts.losses import LAST_ONLY, two_backwards
from tests.scripts.ordinary import micro_steps, one_backward
from tests.scripts.windows import window as several_in_a_window
from tests.training.options import ALL_REDUCED

#: Orthogonalising takes half precision; ZeRO-3 asks for whole gradients. The patch muon has a part
#: in every step.
SAID: dict[str, Any] = {"muon": True, "tolerance": 4e-3, "at_rest": False, **ALL_REDUCED}


@script(ALL_RIGHT, **SAID)
def muon(trainer: Any) -> None:
    """One backward in a step."""
    one_backward(trainer)


@script(ALL_RIGHT, micro_steps=2, **SAID)
def muon_micro_steps(trainer: Any) -> None:
    """Two micro steps in a step."""
    micro_steps(trainer)


@script(LAST_ONLY, **SAID)
def muon_two_backwards(trainer: Any) -> None:
    """Two backwards over one forward."""
    two_backwards(trainer)


@script(ALL_RIGHT, **SAID)
def muon_window(trainer: Any) -> None:
    """Three backwards in a block of coalesce_grad_reduction()."""
    several_in_a_window(trainer)
