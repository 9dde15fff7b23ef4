"""Finds trainable parameters that do not train although their modules run.

    with ds_patches.train_check(engine):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

A gradient that is lost on its way to the optimizer raises no error: the loss still falls, by the
other parameters. The check reads the gradients that the optimizer steps with (steps.py), records
which modules ran (trainable.py), combines the ranks' results and reports the other parameters
(check.py). It works at every ZeRO stage, for any cause, with and without patches.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ds_patches.core.errors import NotChecked
from ds_patches.diagnostics.traincheck.report import Action, NotTrained, TrainReport, Untrained

__all__ = ["NotChecked", "NotTrained", "TrainReport", "Untrained", "train_check"]


def train_check(engine: Any, *, action: Action = "raise") -> AbstractContextManager[TrainReport]:
    """Check which parameters the steps inside a block train. Collective.

    A parameter trains if, in any step of the block, any element of the gradient that the optimizer
    steps with is not zero, on any rank. Put several steps into the block if zero is right in the
    first one, as for the first matrix of LoRA.

    action: "raise" NotTrained if a parameter did not train although its module ran, or "warn", or
    only "report" it. `with ... as report` returns the report, which is filled at the block's end.

    The block's end runs one small all-reduce over the ranks that share gradients; all of them must
    run the block. Raises NotChecked if no step was taken in the block, or if the gradients of the
    engine's optimizer cannot be read.
    """
    from ds_patches.diagnostics.traincheck.check import checking

    return checking(engine, action)
