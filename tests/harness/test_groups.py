"""Engines whose ranks are not the whole world: each patch asks the engine's group, and no other."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch.distributed as dist

import ds_patches
from ds_patches import RanksDisagree
from tests.core.test_agreement import impatient
from tests.diagnostics.traincheck import checked as train_check
from tests.harness import Options, Ranks, applied, build_engine, config, models, parallel
from tests.harness.trainers import EngineTrainer, PlainTrainer, worst_difference
from tests.scripts import windows
from tests.world import World, on_ranks

ALONE: Ranks = [[0], [1]]


@on_ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_a_train_check_asks_the_ranks_of_its_engine(stage: int) -> None:
    """Two engines of one rank each: on rank 0 a layer is cut off, on rank 1 it trains."""
    with parallel(ALONE) as mpu:
        model = models.build(train_check.model_of("trains on one rank"))
        engine = build_engine(model, config(stage), mpu)
        verdict = train_check.verdict_of(engine, lambda: train_check.step(engine))
    cut_off = not dist.get_rank()
    assert list(verdict.untrained) == (["cut.weight", "cut.bias"] if cut_off else [])
    assert verdict.error.startswith("NotTrained" if cut_off else "")
    assert cut_off or verdict.steps == 1


@on_ranks
@pytest.mark.parametrize("sequence", [[[0, 1]], []], ids=str)
def test_ranks_that_share_a_sequence_must_agree(sequence: Ranks) -> None:
    """Each is its data parallel group's only rank. ZeRO reduces over both, or over one alone."""
    refuses = sequence and not dist.get_rank()
    with impatient(), parallel(ALONE, sequence) as mpu:
        ds_patches.apply_all(only="coalesce", skip="coalesce" if dist.get_rank() else ())
        words = "rank 1 did not post which patches are applied"
        with pytest.raises(RanksDisagree, match=words) if refuses else nullcontext():
            build_engine(models.build("TwoHeads"), config(2), mpu)


def windows_of_a_group(data: Ranks) -> float:
    """How far from plain PyTorch's three windows end, over the ranks of a group of this one's."""
    differences = []
    for stage in (1, 2, 3):
        with parallel(data) as mpu, applied("coalesce"):
            start = models.build("TwoHeads")
            plain = PlainTrainer(deepcopy(start), Options())
            plain.group = mpu.data
            windows.window(plain)
            trainer = EngineTrainer(build_engine(start, config(stage), mpu), Options(stage))
            windows.window(trainer)
            ends = trainer.parameters(), plain.parameters()
            differences.append(worst_difference(*ends)[0])
    return max(differences)


def test_a_window_of_one_rank_of_two(world: World) -> None:
    assert max(world.run(windows_of_a_group, ALONE)) <= 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", [[[0, 2], [1, 3]], [[1, 2, 3], [0]]], ids=str)
def test_a_window_of_some_ranks_of_four(four: World, data: Ranks) -> None:
    assert max(four.run(windows_of_a_group, data)) <= 1e-6
