"""The block: watch, let the ranks agree, say what was found."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch.distributed as dist

from ds_patches.core.agreement import reduction_group
from ds_patches.core.errors import NotChecked
from ds_patches.diagnostics.traincheck.report import Action, NotTrained, TrainReport
from ds_patches.diagnostics.traincheck.steps import Steps
from ds_patches.diagnostics.traincheck.trainable import SEEN, Trainable, trainables, watched
from ds_patches.steps.ranks import on_any
from ds_patches.upstream.coverage import compiles_backward

log = logging.getLogger("ds_patches")

ACTIONS = get_args(Action)


@contextmanager
def checking(engine: Any, action: Action) -> Iterator[TrainReport]:
    """See `ds_patches.train_check`."""
    if action not in ACTIONS:
        raise ValueError(f"train_check(): action is {action!r}, not one of {', '.join(ACTIONS)}")
    report = TrainReport()
    params = trainables(engine.module)
    # Such graphs run no hook; and what an accumulation has begun with before, nobody has heard.
    deaf = (
        compiles_backward(engine) or engine.micro_steps % engine.gradient_accumulation_steps() != 0
    )
    steps = Steps(engine.optimizer, params, deaf)
    with watched(engine.module, params), steps.watched():
        yield report
    no_steps = [not steps.taken + steps.skipped, not steps.taken]
    no_step, no_inner_step = _agree(engine, params, no_steps)
    report.parameters, report.skipped = len(params), steps.skipped
    if no_step:
        raise NotChecked(
            "no optimizer step was taken inside train_check(): a whole gradient accumulation, up "
            "to the engine.step() at its boundary, has to be in the block, on every rank"
        )
    speaks = action != "report" and dist.get_rank(reduction_group(engine)) == 0
    if no_inner_step:
        if speaks:
            log.warning("every step inside train_check() was skipped for overflow: no verdict")
        return
    report.steps = steps.taken
    # Equal sums alone tell nothing: a gradient may be the same in each step.
    without = [p for p in params if not p.trained and not (p.stale and p.came)]
    report.untrained = tuple(param.untrained() for param in without if param.is_accused)
    report.idle = tuple(param.untrained() for param in without if not param.is_accused)
    if report.idle and speaks:
        log.warning("%s", report.remark())
    if report.untrained and action == "raise":
        raise NotTrained(report)
    if report.untrained and speaks:
        log.warning("%s", report.accusation())


def _agree(engine: Any, params: Sequence[Trainable], more: Sequence[bool]) -> list[bool]:
    """Make each flag true that is true on any rank; return those of `more`. Collective."""
    flags = [getattr(param, name) for param in params for name in SEEN]
    values = map(bool, on_any([*flags, *more], reduction_group(engine)).tolist())
    for param in params:
        for name in SEEN:
            setattr(param, name, next(values))
    return [*values]
