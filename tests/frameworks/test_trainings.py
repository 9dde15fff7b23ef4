"""Each script ends with the patches where one process without DeepSpeed does; and stock as said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.conftest import Ranks
from tests.frameworks.runs import LOST, Run, assert_patched, automatic, on_two, part_lost
from tests.frameworks.trainings import (
    RIGHT,
    TRAINER,
    TRAINER_OFFLOADED,
    TRAININGS,
    TWO_LOSSES,
    WRONG,
    Training,
    causal,
)
from tests.training.trainers import Parameters, worst_difference

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
        for old, stages in ((False, training.stock), (True, training.old)):
            for stage in stages:
                quick = stage == 2 and not (old or training.exhaustive)
                marks = [] if quick else [pytest.mark.exhaustive]
                marks.append(needs(training.package))
                name = f"{training.title}-{stage}{'-old' * old}"
                yield pytest.param(training, stage, old, id=name, marks=marks)


@pytest.mark.parametrize(("training", "stage", "old"), [*cases()])
def test_training(
    request: pytest.FixtureRequest,
    prepare: Prepare,
    folder: Path,
    training: Training,
    stage: int,
    old: bool,
) -> None:
    ranks: Ranks = request.getfixturevalue("old_ranks" if old else "ranks")
    start, reference = prepare(training)
    stock, found = (training.on_two(world, folder, stage) for world in ranks[:2])
    assert not stock.live
    said = (training.old if old else training.stock)[stage]
    if said == RIGHT:
        training.assert_equal(stock, reference, start)
    elif said == WRONG:
        assert part_lost(stock, reference, start) > LOST
    else:
        assert said in stock.error
    assert_patched(found)
    training.assert_equal(found, reference, start)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("training", [TRAINER, TRAINER_OFFLOADED], ids=["", "offload"])
@pytest.mark.parametrize("to_patched", [True, False])
def test_a_checkpoint_is_resumed_the_other_way(
    ranks: Ranks,
    prepare: Prepare,
    folder: Path,
    tmp_path: Path,
    stage: int,
    training: Training,
    to_patched: bool,
) -> None:
    """The second half of the steps, after the first one's checkpoint was loaded."""
    start, reference = prepare(training)
    first, second = ranks[:2] if to_patched else ranks[1::-1]
    half = training.steps // 2
    one = replace(training, arguments=(Path("lm"), tmp_path))
    whole = one.on_two(first, folder, stage, save_strategy="steps", save_steps=half)
    one.assert_equal(whole, reference, start)
    resumed = one.on_two(second, folder, stage, resume=tmp_path / f"checkpoint-{half}")
    assert resumed.reductions == half * (training.reductions or 0)
    replace(one, reductions=None).assert_equal(resumed, reference, start)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_losses_in_accelerates_own_way(ranks: Ranks, folder: Path, stage: int) -> None:
    """Its no_sync() does nothing at stages 2 and 3, and its backward() steps: two steps a batch.

    Older releases of Accelerate: tests/coalesce/test_accelerate.py.
    """
    training = replace(TWO_LOSSES, arguments=("two_losses",))
    stock, found = (training.on_two(world, folder, stage) for world in ranks[:2])
    if stage == 3:
        assert "size of tensor a (0)" in stock.error
    else:
        assert stock.engine_steps == 2 * training.steps
    (said,) = [found.error] if stage == 3 else found.heard
    assert "backward over a forward from before engine.step()" in said


@pytest.mark.exhaustive
@needs("trl")
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_trl_trains_the_same_to_the_last_bit(ranks: Ranks, folder: Path, kind: str) -> None:
    """GRPO generates in each step: TRL takes ZeRO's hooks away for that, and adds them again."""
    start = causal(folder)
    arguments = (f"hf:{kind}", folder / "lm", folder / kind, automatic(3))
    stock, found = (on_two(world, *arguments) for world in ranks[:2])
    assert not stock.error
    assert not stock.live
    assert_patched(found)
    assert found.losses == stock.losses
    assert worst_difference(found.parameters, stock.parameters)[0] == 0
    assert found.reductions == stock.reductions
    adapters = [param for name, param in found.parameters.items() if "lora_B" in name]
    assert len(adapters) == 4
    assert all(param.abs().max() > 0 for param in adapters), "they begin with zeros"
    assert len(found.parameters) == len(start) + 2 * len(adapters)
    assert set(stock.gathers) == {"deepspeed"}
    assert found.gathers == {"ds_patches": stock.gathers.total()}
