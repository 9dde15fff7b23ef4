"""Which trainable parameters do not train though their modules run: a guard for any loop.

    with ds_patches.train_check(engine):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

A gradient that is lost on its way to the optimizer is silent: the loss still falls, by the other
parameters. So this looks at what the optimizer steps with (steps.py), knows which modules ran
(trainable.py), lets the ranks agree and names the rest (check.py). It holds for every ZeRO stage
and for any cause, and knows no patch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ds_patches.core.errors import NotChecked
from ds_patches.diagnostics.traincheck.report import Action, NotTrained, TrainReport, Untrained

__all__ = ["NotChecked", "NotTrained", "TrainReport", "Untrained", "train_check"]


def train_check(engine: Any, *, action: Action = "raise") -> AbstractContextManager[TrainReport]:
    """Watch the steps of `engine` inside a block; at its end name what did not train.

    A parameter trains if, in any step of the block, any element of the gradient that the optimizer
    steps with is not zero, on any rank. Put several steps into the block if zero is right in the
    first one, as for the first matrix of LoRA.

    action: "raise" NotTrained if a parameter did not train though its module ran; "warn" of it
    instead, or only "report" it. The report is what `with ... as report` gives, filled at the end.

    Adds one small all-reduce at the end of the block, over the ranks that share gradients. All of
    them must have the block. Raises NotChecked where nothing can be said: no step was taken, or
    the engine's optimizer is not one that can be looked into.
    """
    from ds_patches.diagnostics.traincheck.check import checking

    return checking(engine, action)
