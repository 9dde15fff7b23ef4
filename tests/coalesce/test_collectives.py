"""How much is sent: once per window, however many backwards it has."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.coalesce.loops import several_backwards
from tests.training import models
from tests.training.collectives import Collectives
from tests.training.models import loss_of
from tests.training.options import OFFLOADED, OVERLAP
from tests.training.run import applied
from tests.training.trainers import engine_trainer, gathered
from tests.world import World


def sent_in(
    stage: int, backwards: int, more: dict[str, Any], flush: str, **window: Any
) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of the second step's window: inside it, and at its end."""
    with applied("coalesce", flush=flush):
        trainer = engine_trainer(stage=stage, steps=2, **more)
        several_backwards(trainer, backwards=1, **window)
        engine = trainer.engine
        inside, at_end = Collectives(), Collectives()
        open_window = engine.coalesce_grad_reduction(**window)
        with inside:
            open_window.__enter__()
            for index in range(backwards):
                engine.backward(loss_of(engine, 2, index))
        with at_end:
            open_window.__exit__(None, None, None)
        return dict(inside.seen), dict(at_end.seen)


MORE: list[dict[str, Any]] = [{}, OFFLOADED, OVERLAP]


@pytest.mark.core_case(more={}, flush="reduce_scatter", stage=3)
@pytest.mark.parametrize(
    ("stage", "more", "flush"),
    [  # the option has no say at stage 3, nor with an offloaded optimizer
        *((stage, more, "reduce_scatter") for stage in (1, 2, 3) for more in MORE),
        *((stage, more, "upstream") for stage in (1, 2) for more in ({}, OVERLAP)),
    ],
    ids=str,
)
def test_reductions_do_not_depend_on_the_number_of_backwards(
    world: World, stage: int, more: dict[str, Any], flush: str
) -> None:
    ends = []
    for backwards in (2, 8):
        for inside, at_end in world.run(sent_in, stage, backwards, more, flush):
            assert not any("reduce" in name for name in inside), inside
            ends.append(Counter(at_end))
    assert all(end == ends[0] for end in ends)
    assert sum(ends[0].values()) > 0


@pytest.mark.core_case
@pytest.mark.parametrize("stage", [1, 2])
def test_a_flat_flush_scatters(world: World, stage: int) -> None:
    for _, at_end in world.run(sent_in, stage, 2, {}, "reduce_scatter"):
        assert at_end
        assert all("reduce_scatter" in name for name in at_end), at_end


def test_gather_once_gathers_once(world: World) -> None:
    counts = {}
    for gather_once in (False, True):
        for backwards in (1, 4):
            case = {"flush": "reduce_scatter", "gather_once": gather_once}
            for inside, _ in world.run(sent_in, 3, backwards, {}, **case):
                found = sum(n for name, n in inside.items() if "allgather" in name)
                assert counts.setdefault((gather_once, backwards), found) == found
    assert counts[True, 4] == counts[True, 1] > 0
    # Twice per backward, but for what upstream's trace keeps from one use to the next.
    assert counts[False, 4] > 3 * counts[True, 4]


def held_by(gather_once: bool) -> tuple[int, int]:
    """Parameters gathered between two backwards of a window, and after it."""
    with applied("coalesce"):
        trainer = engine_trainer(stage=3)
        counts = []
        with trainer.window(gather_once=gather_once):
            for index in range(2):
                trainer.backward(loss_of(trainer, 0, index))
                counts.append(len(gathered(trainer.engine, entitled=False)))
        return counts[0], len(gathered(trainer.engine, entitled=False))


def test_gather_once_holds_every_parameter_until_the_window_ends(world: World) -> None:
    parameters = len(list(models.build("TwoHeads").parameters()))
    for between, after in world.run(held_by, True):
        assert (between, after) == (parameters, 0)
