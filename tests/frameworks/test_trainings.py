"""Each script ends with the patches where one process without DeepSpeed does; and stock as said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.conftest import Ranks
from tests.frameworks.runs import LOST, Run, assert_patched, part_lost
from tests.frameworks.trainings import GRADCACHE, RIGHT, TRAININGS, WRONG, Training
from tests.training.trainers import Parameters
from tests.world import World

Prepare = Callable[[Training], tuple[Parameters, Run]]


@pytest.fixture(scope="module")
def prepare(alone: World, folder: Path) -> Prepare:
    """Where a training starts, and what it comes to without DeepSpeed."""
    return cache(lambda training: (training.start(folder), training.on_one(alone, folder)))


def cases() -> Iterator[Any]:
    for training in TRAININGS:
        missing = training.script == "lit" and find_spec("lightning") is None
        skip = pytest.mark.skipif(missing, reason="lightning is in the extra `frameworks`")
        for old, stages in ((False, training.stock), (True, training.old)):
            for stage in stages:
                quick = stage == 2 and not (old or training.exhaustive)
                marks = [] if quick else [pytest.mark.exhaustive]
                name = f"{training.title}-{stage}{'-old' * old}"
                yield pytest.param(training, stage, old, id=name, marks=[*marks, skip])


@pytest.mark.parametrize(("training", "stage", "old"), [*cases()])
def test_training(
    request: pytest.FixtureRequest,
    prepare: Prepare,
    folder: Path,
    training: Training,
    stage: int,
    old: bool,
) -> None:
    ranks: Ranks = request.getfixturevalue("old_ranks" if old else "new_ranks")
    start, reference = prepare(training)
    stock, found = (training.on_two(world, folder, stage) for world in ranks)
    assert not stock.live
    said = (training.old if old else training.stock)[stage]
    if said == RIGHT:
        training.assert_equal(stock, reference, start)
    elif said == WRONG:
        assert part_lost(stock, reference, start) > LOST
    else:
        assert said in stock.error
    if old and stage in training.old_fails:
        assert said in found.error
        return
    assert_patched(found)
    training.assert_equal(found, reference, start)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cached_gradients_may_be_reduced_at_once(
    prepare: Prepare, patched: World, folder: Path, stage: int
) -> None:
    start, reference = prepare(GRADCACHE)
    found = GRADCACHE.on_two(patched, folder, stage, reduces_once=True)
    assert_patched(found)
    assert found.reductions == GRADCACHE.steps
    found.reductions *= GRADCACHE.reductions or 0
    GRADCACHE.assert_equal(found, reference, start)
