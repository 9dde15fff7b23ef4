"""Each script ends with the patches where one process without DeepSpeed does; and stock as said."""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.conftest import Ranks
from tests.frameworks.runs import Run, assert_patched, automatic, on_two
from tests.frameworks.trainings import LOST, RIGHT, TRAININGS, WRONG, Training, causal
from tests.harness.trainers import Parameters, worst_difference

Prepare = Callable[[Training], tuple[Parameters, Run]]


def needs(package: str) -> pytest.MarkDecorator:
    missing = bool(package) and find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is in the extra `frameworks`")


@pytest.fixture(scope="module")
def prepare(ranks: Ranks, folder: Path) -> Prepare:
    """Where a training starts, and what it comes to without DeepSpeed."""
    return cache(lambda training: (training.start(folder), training.on_one(ranks.alone, folder)))


def cases() -> Iterator[Any]:
    for training in TRAININGS:
        for release, stages in ({"": training.stock} | training.older).items():
            for stage, verdict in stages.items():
                name = f"{training.title}-{stage}-{release}".rstrip("-")
                needed = needs(training.package)
                yield pytest.param(training, stage, release, verdict, id=name, marks=needed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("training", "stage", "release", "verdict"), [*cases()])
def test_training(
    ranks_on: Callable[[str], Ranks],
    prepare: Prepare,
    folder: Path,
    training: Training,
    stage: int,
    release: str,
    verdict: str,
) -> None:
    start, reference = prepare(training)
    stock, patched = (training.on_two(world, folder, stage) for world in ranks_on(release)[:2])
    assert not stock.live
    if verdict == RIGHT:
        training.assert_equal(stock, reference, start)
    elif verdict == WRONG:
        assert training.part_lost(stock, reference, start) > LOST
    else:
        assert verdict in stock.error
    assert_patched(patched)
    training.assert_equal(patched, reference, start)


@pytest.mark.exhaustive
@needs("trl")
def test_grpo_trains_the_same_to_the_last_bit(ranks: Ranks, folder: Path) -> None:
    """GRPO generates in each step: TRL takes ZeRO's hooks away for that, and adds them again."""
    start = causal(folder)
    arguments = ("hf:grpo", folder / "lm", folder / "grpo", automatic(3))
    stock, patched = (on_two(world, *arguments) for world in ranks[:2])
    assert not stock.error
    assert not stock.live
    assert_patched(patched)
    assert patched.losses == stock.losses
    assert worst_difference(patched.parameters, stock.parameters)[0] == 0
    assert patched.reductions == stock.reductions
    adapters = [param for name, param in patched.parameters.items() if "lora_B" in name]
    assert len(adapters) == 4
    assert all(param.abs().max() > 0 for param in adapters), "they begin with zeros"
    assert len(patched.parameters) == len(start) + 2 * len(adapters)
