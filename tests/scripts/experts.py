"""Ranks that use different parameters in one step: each batch is routed to experts of its own."""

from typing import Any

from tests.scripts.declared import WRONG, script
from tests.scripts.losses import two_backwards
from tests.scripts.ordinary import micro_steps, one_backward

BOTH_WRONG = {1: WRONG, 2: WRONG}
ROUTED: dict[str, Any] = {"model": "Routed", "at_rest": False}


@script(BOTH_WRONG, **ROUTED, grouped=(1, 2))
def routed(trainer: Any) -> None:
    """Ranks use different experts; one backward a step."""
    one_backward(trainer)


@script({2: WRONG}, **ROUTED, micro_steps=4)
def routed_micro_steps(trainer: Any) -> None:
    """Ranks use different experts, others in each of four micro steps."""
    micro_steps(trainer)


@script(BOTH_WRONG, **ROUTED)
def routed_losses_apart(trainer: Any) -> None:
    """Ranks use different experts; two backwards over one forward."""
    two_backwards(trainer)
