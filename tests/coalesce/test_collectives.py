"""How much is sent: once per block, however many backwards it has."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.coalesce.loops import UPSTREAM, several_backwards
from tests.training.collectives import Collectives
from tests.training.models import loss_of
from tests.training.options import OFFLOADED, OVERLAP
from tests.training.run import applied
from tests.training.trainers import engine_trainer
from tests.world import World


def sent_in(
    stage: int, backwards: int, more: dict[str, Any]
) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of the second step's block: inside it, and at its end."""
    with applied("coalesce"):
        trainer = engine_trainer(stage=stage, steps=2, **more)
        several_backwards(trainer, backwards=1)
        engine = trainer.engine
        inside, at_end = Collectives(), Collectives()
        block = engine.coalesce_grad_reduction()
        with inside:
            block.__enter__()
            for index in range(backwards):
                engine.backward(loss_of(engine, 2, index))
        with at_end:
            block.__exit__(None, None, None)
        return dict(inside.seen), dict(at_end.seen)


@pytest.mark.core_case(more={}, stage=3)
@pytest.mark.parametrize("more", [{}, OFFLOADED, OVERLAP, UPSTREAM], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reductions_do_not_depend_on_the_number_of_backwards(
    world: World, stage: int, more: dict[str, Any]
) -> None:
    ends = []
    for backwards in (2, 8):
        for inside, at_end in world.run(sent_in, stage, backwards, more):
            assert not any("reduce" in name for name in inside), inside
            ends.append(Counter(at_end))
    assert all(end == ends[0] for end in ends)
    assert sum(ends[0].values()) > 0


@pytest.mark.core_case
@pytest.mark.parametrize("stage", [1, 2])
def test_a_flat_flush_scatters(world: World, stage: int) -> None:
    for _, at_end in world.run(sent_in, stage, 2, {}):
        assert at_end
        assert all("reduce_scatter" in name for name in at_end), at_end
