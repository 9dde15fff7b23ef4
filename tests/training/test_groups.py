"""Engines whose ranks are not the whole world: each patch asks the engine's group, and no other."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch.distributed as dist

import ds_patches
from tests.core.test_agreement import impatient
from tests.scripts import windows
from tests.traincheck import checked as train_check
from tests.training import models
from tests.training.groups import Ranks, parallel
from tests.training.options import Options, config
from tests.training.run import applied
from tests.training.surroundings import build_engine
from tests.training.trainers import EngineTrainer, PlainTrainer, worst_difference
from tests.world import World

ALONE: Ranks = [[0], [1]]


# --- train_check ---------------------------------------------------------------------------------


def each_checks_its_own(stage: int) -> train_check.Outcome:
    """Two engines of one rank each: on rank 0 a layer is cut off, on rank 1 it trains."""
    with parallel(ALONE) as mpu:
        model = models.build(train_check.model_of("trains on one rank"))
        engine = build_engine(model, config(stage), mpu)
        return train_check.outcome_of(engine, lambda: train_check.step(engine))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_train_check_asks_the_ranks_of_its_engine(world: World, stage: int) -> None:
    cut_off, trains = world.run(each_checks_its_own, stage)
    assert list(cut_off.untrained) == ["cut.weight", "cut.bias"]
    assert cut_off.error.startswith("NotTrained")
    assert trains == train_check.Outcome(steps=1)


# --- Agreement -----------------------------------------------------------------------------------


def applied_on_rank_0(sequence: Ranks) -> str:
    """What building an engine raises where rank 1 leaves a patch out; data groups are of one."""
    with impatient(), parallel(ALONE, sequence) as mpu:
        ds_patches.apply_all(only="coalesce", skip="coalesce" if dist.get_rank() else ())
        try:
            build_engine(models.build("TwoHeads"), config(2), mpu)
        except ds_patches.RanksDisagree as error:
            return str(error)
        return ""


def test_ranks_that_share_a_sequence_must_agree(world: World) -> None:
    """Each is its data parallel group's only rank, and ZeRO reduces over both."""
    patched, bare = world.run(applied_on_rank_0, [[0, 1]])
    assert "coalesce is live" in patched
    assert "on rank 1" in patched
    assert bare == "", "it has nothing to refuse"


def test_ranks_of_two_engines_need_not_agree(world: World) -> None:
    assert world.run(applied_on_rank_0, ()) == ["", ""]


# --- coalesce ------------------------------------------------------------------------------------


def windows_of_a_group(data: Ranks, stage: int) -> float:
    """How far from plain PyTorch's three windows end, over the ranks of a group of this one's."""
    with parallel(data) as mpu, applied("coalesce"):
        start = models.build("TwoHeads")
        plain = PlainTrainer(deepcopy(start), Options())
        plain.group = mpu.data
        windows.window(plain)
        trainer = EngineTrainer(build_engine(start, config(stage), mpu), Options(stage))
        windows.window(trainer)
        return worst_difference(trainer.parameters(), plain.parameters())[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_window_of_one_rank_of_two(world: World, stage: int) -> None:
    assert max(world.run(windows_of_a_group, ALONE, stage)) <= 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", [[[0, 2], [1, 3]], [[1, 2, 3], [0]]], ids=str)
def test_a_window_of_some_ranks_of_four(data: Ranks) -> None:
    with World(4) as four:
        for stage in (1, 2, 3):
            assert max(four.run(windows_of_a_group, data, stage)) <= 1e-6
