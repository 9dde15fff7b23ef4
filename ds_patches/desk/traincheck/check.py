"""The block: watch, let the ranks agree, say what was found."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch.distributed as dist

from ds_patches.core.agreement import reduction_group
from ds_patches.core.errors import NotChecked
from ds_patches.desk.traincheck.modules import Trainable, trainables, watched
from ds_patches.desk.traincheck.report import Action, NotTrained, TrainReport, Untrained
from ds_patches.desk.traincheck.steps import Steps
from ds_patches.steps.ranks import on_any
from ds_patches.upstream.engine import is_left

log = logging.getLogger("ds_patches")

ACTIONS = get_args(Action)


@contextmanager
def checking(engine: Any, action: Action) -> Iterator[TrainReport]:
    """See `ds_patches.train_check`."""
    if action not in ACTIONS:
        raise ValueError(f"train_check(): action is {action!r}, not one of {', '.join(ACTIONS)}")
    report = TrainReport()
    found = trainables(engine.module)
    # Such graphs run no hook; and what an accumulation has begun with before, nobody has heard.
    deaf = is_left(engine) or engine.micro_steps % engine.gradient_accumulation_steps() != 0
    steps = Steps(engine.optimizer, [trainable.param for trainable in found], deaf)
    with watched(engine.module, found) as has_run, steps.watched():
        yield report
    keys = [id(trainable.param) for trainable in found]
    told = (steps.trained, steps.stale, steps.came, steps.left, steps.held)
    trained, stale, came, left, held, ran, (no_step, no_inner_step) = _agreed(
        engine,
        *([key in ids for key in keys] for ids in told),
        [has_run(trainable) for trainable in found],
        [not steps.taken + steps.skipped, not steps.taken],
    )
    report.parameters, report.skipped = len(found), steps.skipped
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
    trained = [t or (s and c) for t, s, c in zip(trained, stale, came, strict=True)]
    _judge(report, found, trained, stale, left, held, ran)
    if report.idle and speaks:
        log.warning("%s", report.remark())
    if report.untrained and action == "raise":
        raise NotTrained(report)
    if report.untrained and speaks:
        log.warning("%s", report.accusation())


def _agreed(engine: Any, *flags: Sequence[bool]) -> list[list[bool]]:
    """Return each row as true where it is true on any rank."""
    flat = [flag for row in flags for flag in row]
    values = iter(on_any(flat, reduction_group(engine)).tolist())
    return [[bool(next(values)) for _ in row] for row in flags]


def _judge(report: TrainReport, found: Sequence[Trainable], *agreed: Sequence[bool]) -> None:
    """Sort parameters without a gradient: accused, or with an excuse."""
    untrained: list[Untrained] = []
    idle: list[Untrained] = []
    for trainable, trained, stale, left, held, ran in zip(found, *agreed, strict=True):
        if trained:
            continue
        notes = []
        if not held:
            notes.append("not in the optimizer")
        elif left:
            notes.append("its gradient stayed on the parameter and was not reduced")
        elif not ran and trainable.compiled:
            notes.append("in a compiled module, where it is not seen to run")
        if stale:
            notes.append("stepped with the gradient of an earlier step")
        accused = held and (ran or left or trainable.compiled)
        (untrained if accused else idle).append(
            Untrained(trainable.name, trainable.owner, ", ".join(notes))
        )
    report.untrained, report.idle = tuple(untrained), tuple(idle)
