"""Steps that gather once: how often, how much stays, and what scripts may do in between."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ds_patches
from tests.coalesce.test_gather_once import Gathers, limited
from tests.harness import EAGER, World, models
from tests.harness.cases import checked, of
from tests.harness.models import Losses, TwoHeads, batch, loss_of
from tests.harness.options import BF16, FP16, OFFLOADED, OFFLOADED_ALL, OVERLAP, PERSISTENT
from tests.harness.run import applied, run
from tests.harness.trainers import engine_trainer
from tests.scripts import law, ordinary, windows
from tests.scripts.declared import RIGHT, Script, scripts
from tests.scripts.evaluating import without_hooks
from tests.scripts.worlds import PATCHED, prepare, train
from tests.world import on_ranks

NAME = "zero3_gather_once"
MODELS = ["FrozenTrunk", "TiedEmbedding", "SharedBlock", "LeafModule", "Reentrant", "NonReentrant"]
MODELS += ["Adapted", "CheckpointedAdapted", "DeepReentrantAdapted", "HeadFirst", "HeadRecomputed"]


def counts(elements: int, **options: Any) -> list[tuple[set[int], list[str]]]:
    """Return for each step how often parameters were gathered, and which stay gathered after it."""
    trainer = engine_trainer(stage=3, micro_steps=2, steps=4, **limited(elements), **options)
    gathers, seen = Gathers(trainer), []
    for step in trainer.steps():
        gathers.begin()
        for micro in range(2):
            trainer.backward(loss_of(trainer, step, micro))
            with torch.no_grad():
                trainer(batch(step)[0])  # an evaluation between micro steps
            trainer.step()
        left = [name for name, p in gathers.params.items() if p.ds_status.name == "AVAILABLE"]
        seen.append(({gathers.counts[name] for name in gathers.params}, left))
    return seen


@on_ranks
@pytest.mark.core_case(model="TwoHeads")
@pytest.mark.parametrize("model", ["TwoHeads", *MODELS])
def test_a_step_gathers_once_and_leaves_nothing(model: str) -> None:
    """But for the first, which shows what the model is like."""
    elements = sum(param.numel() for param in models.build(model).parameters())
    with applied(NAME):
        assert counts(elements, model=model)[1:] == [({1}, [])] * 3
        (note,) = ds_patches.status()[NAME].notes
        assert note == "ZeRO-3 steps gather parameters once: all fit"


@on_ranks
def test_what_does_not_fit_is_gathered_as_ever() -> None:
    elements = sum(param.numel() for param in models.build("TwoHeads").parameters())
    as_stock = counts(elements - 1)
    with applied(NAME):
        assert counts(elements - 1) == as_stock
        (note,) = ds_patches.status()[NAME].notes
        assert "in each forward and backward" in note


with_it = f"{NAME} zero3_retain zero3_hooks coalesce"
test_options = checked(
    *(of(with_it, ordinary.micro_steps, 3, micro_steps=2, model=model) for model in MODELS),
    *(
        of(with_it, ordinary.micro_steps, 3, micro_steps=2, **more)
        for more in (OFFLOADED, OFFLOADED_ALL, OVERLAP, {"zero": PERSISTENT}, BF16, FP16)
    ),
    of(with_it, ordinary.one_backward, 3, core={3}, style="torch"),
    of(with_it, windows.window_among_micro_steps, 3, micro_steps=3, core={3}),
)


class Peeking(TwoHeads):
    """Reads a weight in a ``GatheredParameters`` of its forward, and uses it after that."""

    def heads(self, x: torch.Tensor) -> Losses:
        from deepspeed.runtime.zero import GatheredParameters

        weight = self.classify.weight
        with GatheredParameters([weight], enabled=hasattr(weight, "ds_id")), torch.no_grad():
            scale = 1.0 + weight.square().mean()
        return super().heads(x * scale)


def peeks(trainer: Any, step: int) -> None:
    """Weights are read and written between a forward and the step; hooks are removed and added."""
    loss = loss_of(trainer, step)
    with trainer.gathered([trainer.module.classify.bias]), without_hooks(trainer):
        pass
    trainer.backward(loss)
    with trainer.gathered(trainer.module.blocks.parameters()):
        assert all(param.numel() for param in trainer.module.blocks.parameters())


test_parameters_gathered_inside_and_around = checked(
    of(with_it, peeks, 3, core={3}, model=Peeking, zero={"stage3_prefetch_bucket_size": 0}),
)


def saves(trainer: Any) -> None:
    """Checkpoints between forward and backward, and between micro steps; hooks go and come."""
    for step in trainer.steps():
        loss = loss_of(trainer, step, 0)
        trainer.save()
        trainer.backward(loss)
        trainer.step()
        loss = loss_of(trainer, step, 1)
        with without_hooks(trainer):
            pass
        trainer.backward(loss)
        trainer.save()
        trainer.step()


def test_checkpoints_and_hooks_in_mid_step(world: World, tmp_path: Any) -> None:
    options = ordinary.micro_steps.at(3, micro_steps=2, steps=4)
    for outcome in world.run(run, saves, options, *with_it.split(), folder=str(tmp_path)):
        assert outcome.equal, outcome


def comes_and_goes(trainer: Any, step: int, micro: int) -> None:
    """Applied and taken back between forward and backward, and between micro steps."""
    loss = loss_of(trainer, step, micro)
    if trainer.is_engine:
        (ds_patches.unapply if step % 2 else ds_patches.apply)(NAME)
    trainer.backward(loss)


test_it_comes_and_goes_in_mid_step = checked(
    of(with_it, comes_and_goes, 3, core={3}, micro_steps=2, steps=4)
)


def differs(trainer: Any, step: int) -> None:
    """From the second step on, each rank uses another parameter of a module."""
    rank = torch.distributed.get_rank()
    used = (True, True) if step == 0 else (rank == 0, rank == 1)
    with mock.patch.object(models.Either, "used", used):
        trainer.backward(loss_of(trainer, step))


def test_ranks_that_differ_are_refused(world: World) -> None:
    """DeepSpeed adds gradients of different parameters, and says nothing."""
    options = ordinary.one_backward.at(3, model="Uneven")
    for outcome in world.run(run, differs, options, NAME):
        assert "have used different parameters" in outcome.error


# --- Ordinary scripts, with all patches and this one, which is not among them by default ----------


@pytest.fixture(scope="module")
def gathering() -> Iterator[World]:
    with World(variables={"DS_PATCHES": "all,zero3_gather_once"}, seconds=90.0) as ranks:
        yield ranks


def at_stage_3() -> Iterator[Any]:
    for script in scripts():
        if 3 in script.stock and script.on == EAGER:
            yield pytest.param(script, id=script.name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", [*at_stage_3()])
def test_a_script_ends_where_plain_pytorch_does(
    gathering: World, script: Script, tmp_path: Path
) -> None:
    """Or is refused as with the other patches."""
    options, folder = script.at(3), str(tmp_path)
    if script.before is not None:
        gathering.run(prepare, script, options, PATCHED, folder)
    outcomes = gathering.run(train, script, options, PATCHED, folder, False)
    verdict = law.verdict(outcomes)
    is_refused = script.refusal and re.search(script.refusal, verdict)
    assert verdict == RIGHT or is_refused, verdict
