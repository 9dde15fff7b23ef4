"""Finds trainable parameters that do not train although their modules run.

    with ds_patches.train_check(engine):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

A gradient that is lost on its way to the optimizer raises no error: the loss still falls, by the
other parameters. The check reads the gradients that the optimizer steps with (steps.py), records
which modules ran, combines the ranks' results and reports the other parameters. It
works at every ZeRO stage, for any cause, with and without patches.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch.distributed as dist

from ds_patches.core.agreement import reduction_group
from ds_patches.core.errors import NotChecked
from ds_patches.diagnostics.traincheck.report import Action, NotTrained, TrainReport, Untrained
from ds_patches.diagnostics.traincheck.steps import FLAGS, Steps, Trainable, trainables
from ds_patches.steps.ranks import any_rank

__all__ = ["NotChecked", "NotTrained", "TrainReport", "Untrained", "train_check"]

log = logging.getLogger("ds_patches")

ACTIONS = get_args(Action)


@contextmanager
def train_check(engine: Any, *, action: Action = "raise") -> Iterator[TrainReport]:
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
    if action not in ACTIONS:
        raise ValueError(f"train_check(): action is {action!r}, not one of {', '.join(ACTIONS)}")
    report = TrainReport()
    params = trainables(engine.module)
    steps = Steps(engine, params)
    with steps.recorded():
        yield report
    no_steps = [not steps.taken + steps.skipped, not steps.taken]
    no_step, no_inner_step = _any_rank(engine, params, no_steps)
    report.parameters, report.skipped = len(params), steps.skipped
    if no_step:
        raise NotChecked(
            "no optimizer step was taken inside train_check(): a whole gradient accumulation, up "
            "to the engine.step() at its boundary, has to be in the block, on every rank"
        )
    may_warn = action != "report" and dist.get_rank(reduction_group(engine)) == 0
    if no_inner_step:
        if may_warn:
            log.warning(
                "each step inside train_check() was skipped for overflow: check a later one"
            )
        return
    report.steps = steps.taken
    without = [param for param in params if not param.trained]
    report.untrained = tuple(param.untrained() for param in without if param.should_train)
    report.idle = tuple(param.untrained() for param in without if not param.should_train)
    if report.idle and may_warn:
        log.warning("%s", report.text(idle=True))
    if report.untrained and action == "raise":
        raise NotTrained(report)
    if report.untrained and may_warn:
        log.warning("%s", report.text())


def _any_rank(engine: Any, params: Sequence[Trainable], more: Sequence[bool]) -> list[bool]:
    """Set each flag that is set on any rank; return the flags of `more`. Collective."""
    flags = [getattr(param, name) for param in params for name in FLAGS]
    values = map(bool, any_rank([*flags, *more], reduction_group(engine)).tolist())
    for param in params:
        for name in FLAGS:
            setattr(param, name, next(values))
    return [*values]
