"""Ranks that use different parameters in one step: each batch is routed to experts of its own."""

from __future__ import annotations

from typing import Any

from tests.scripts.declared import WRONG, script
from tests.training.models import both_losses, loss_of
from tests.training.options import BF16_SUMS, FP16, OFFLOADED, OVERLAP

BOTH_WRONG = {1: WRONG, 2: WRONG}
ROUTED: dict[str, Any] = {"model": "Routed", "at_rest": False}


@script(BOTH_WRONG, **ROUTED, grouped=(1, 2))
def routed(trainer: Any) -> None:
    """One backward a step."""
    for step in trainer.steps():
        trainer.backward(loss_of(trainer, step))
        trainer.step()


@script(BOTH_WRONG, **ROUTED, **OVERLAP)
def routed_with_overlap(trainer: Any) -> None:
    """The same, with overlap_comm."""
    routed(trainer)


@script(BOTH_WRONG, **ROUTED, **OFFLOADED)
def routed_offloaded(trainer: Any) -> None:
    """The same, with the optimizer on the CPU."""
    routed(trainer)


@script(BOTH_WRONG, **ROUTED, zero={"contiguous_gradients": False})
def routed_scattered(trainer: Any) -> None:
    """The same, without contiguous_gradients."""
    routed(trainer)


@script({2: WRONG}, **ROUTED, **BF16_SUMS, tolerance=2**-6)
def routed_bf16_fp32_sums(trainer: Any) -> None:
    """The same, in bf16 with fp32 sums."""
    routed(trainer)


@script(BOTH_WRONG, **ROUTED, **FP16, tolerance=2**-8)
def routed_fp16(trainer: Any) -> None:
    """The same, in fp16."""
    routed(trainer)


@script(BOTH_WRONG, **ROUTED, clip=0.05)
def routed_and_clipped(trainer: Any) -> None:
    """The same, with clipping."""
    routed(trainer)


@script(BOTH_WRONG, at_rest=False, model="RoutedReentrant")
def routed_and_recomputed(trainer: Any) -> None:
    """The same, where checkpointing runs the routed layer again, in a backward of its own."""
    routed(trainer)


@script(BOTH_WRONG, at_rest=False, model="RoutedNonReentrant")
def routed_and_recomputed_in_place(trainer: Any) -> None:
    """The same, with the other kind of checkpointing."""
    routed(trainer)


@script(BOTH_WRONG, at_rest=False, model="RoutedTwice")
def routed_twice(trainer: Any) -> None:
    """The expert is used twice in one forward."""
    routed(trainer)


@script({2: WRONG}, **ROUTED, micro_steps=4)
def routed_micro_steps(trainer: Any) -> None:
    """Four micro steps, each with routes of its own."""
    for step in trainer.steps():
        for micro in range(4):
            trainer.backward(loss_of(trainer, step, micro))
            trainer.step()


@script(BOTH_WRONG, **ROUTED)
def routed_losses_apart(trainer: Any) -> None:
    """Two backwards over one forward, each of one head."""
    for step in trainer.steps():
        first, second = both_losses(trainer, step)
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        trainer.step()
