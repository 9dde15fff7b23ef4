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
from tests.world import on_ranks

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


@on_ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_window_of_one_rank_of_two(stage: int) -> None:
    """More ranks are two groups in the scripts' law."""
    with parallel(ALONE) as mpu, applied("coalesce"):
        start = models.build("TwoHeads")
        plain = PlainTrainer(deepcopy(start), Options())
        plain.group = mpu.data
        windows.window(plain)
        trainer = EngineTrainer(build_engine(start, config(stage), mpu), Options(stage))
        windows.window(trainer)
        assert worst_difference(trainer.parameters(), plain.parameters())[0] <= 1e-6
