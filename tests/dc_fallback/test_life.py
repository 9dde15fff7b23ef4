"""Engines that are taken in and given back, that fail, and those that are left to stock."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_patches
from ds_patches.steps import ranks
from tests.dc_fallback import patterns, stand_in
from tests.dc_fallback.loops import patched, trains
from tests.dc_fallback.patterns import inputs
from tests.harness import build_engine, compile_engine, config, leftovers, listening, models
from tests.world import World, on_ranks


def changed(
    trainer: Any, step: int, changes: dict[int, Callable[[str], Any]], notes: Any = ()
) -> None:
    """The patch comes and goes before these steps; its hooks with the first forward after it."""
    if trainer.is_engine and step in changes:
        assert list(changes[step]("dc_fallback").notes) == [*notes]
    loss = trainer(*inputs(step, 0))
    if trainer.is_engine:
        trainer.note()
    trainer.backward(loss)


def test_applied_late(world: World) -> None:
    """When the engine has been compiled and has run."""
    notes = ["1 engine(s) compiled before: left to stock DeepSpeed"]
    script = partial(changed, changes={1: ds_patches.apply}, notes=notes)
    warnings = " ".join(trains(world, "Compiled", script, patches=()).said)
    assert "it was compiled before the patch was applied" in warnings


def test_taken_back_and_applied_again(world: World) -> None:
    changes = {1: ds_patches.unapply, 2: ds_patches.apply}
    trains(world, "Compiled", partial(changed, changes=changes))


@on_ranks
def test_unapply_leaves_the_engine_as_deepcompile_made_it() -> None:
    with stand_in.deep_compile():
        stock = leftovers.of(compile_engine(patterns.build("Disabled"), config(3)))
        with patched():
            engine = compile_engine(patterns.build("Disabled"), config(3))
            engine.backward(engine(*inputs(0, 0)))
            engine.step()
        assert getattr(engine, "_deepcompile_z3_eager_fallback", "none") is not None
        assert not leftovers.since(stock, engine, but=())


#: What is done to an engine, or told to ZeRO, and what is said of it.
NOT_COVERED: list[tuple[Any, str]] = [
    ({}, ""),
    ("no optimizer", ""),
    ({"offload_optimizer": {"device": "cpu"}}, "an offloaded"),
    ({"zero_hpz_partition_size": 2}, "secondary partitions"),
    ("sequence parallel", "under sequence parallelism"),
    ("experts", "some parameters (AutoEP's experts)"),
]


@on_ranks
@pytest.mark.parametrize(("change", "says"), NOT_COVERED, ids=str)
def test_what_it_does_not_cover_it_names(change: Any, says: str) -> None:
    zero = {} if isinstance(change, str) else change
    settings = config(3, zero=zero, compile={"deepcompile": True})
    model = patterns.build("Compiled")
    with stand_in.deep_compile(), patched(), listening() as heard:
        if change == "no optimizer":
            engine, *_ = deepspeed.initialize(model=model, config=settings)
        else:
            engine = build_engine(model, settings)
        if change == "sequence parallel":  # Ulysses would take more ranks than there are
            engine.optimizer.sequence_parallel_size = 2
        if change == "experts":
            alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            next(engine.module.parameters()).ds_process_group = alone[dist.get_rank()]
        engine.compile(backend="eager")
        is_taken_in = vars(engine).get("_ds_patches_dc_fallback") is not None
    warnings = " ".join(text for text in heard if "to stock" in text)
    assert is_taken_in == (change == {})
    assert says in warnings
    assert bool(says) == bool(warnings)


# --- exceptions ---------------------------------------------------------------------------------


@torch.compiler.disable
def refuse(module: Any, args: Any, output: Tensor) -> Any:
    if getattr(module, "refuses", False):
        raise models.Boom("in the forward")
    return models.RaiseInBackward.apply(output)


def refusing(trainer: Any, place: str, layer: int, at_step: int) -> None:
    """A script with a batch that fails and is left out, on every rank."""
    chosen = trainer.module.layers[layer]
    chosen.register_forward_hook(refuse)
    if trainer.is_engine:
        trainer.note()  # the hook
    for step in trainer.steps():
        if step == at_step:
            chosen.refuses = place == "forward"
            models.RaiseInBackward.armed = place == "backward"
            with pytest.raises(models.Boom):
                trainer.backward(trainer(*inputs(step, 1)))
            chosen.refuses = models.RaiseInBackward.armed = False
            trainer.module.zero_grad()
            if trainer.is_engine:
                trainer.leaves_nothing()
        trainer.backward(trainer(*inputs(step, 0)))
        trainer.step()


@pytest.mark.parametrize("at_step", [0, 2])
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("pattern", ["Disabled", "Whole", "Mixed"])
def test_the_next_step_is_right(
    world: World, pattern: str, place: str, layer: int, at_step: int
) -> None:
    script = partial(refusing, place=place, layer=layer, at_step=at_step)
    warnings = " ".join(trains(world, pattern, script, steps=4).said)
    assert ("A backward raised" in warnings) == (place == "backward")


class _RefusesAtTheEnd(models.RaiseInBackward):
    """Raises on one rank alone, when all that its backward sends has been sent."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        def refuse() -> None:
            raise RuntimeError("refused at the end of the backward")

        if dist.get_rank() == 1:
            torch.autograd.Variable._execution_engine.queue_callback(refuse)
        return grad


def raised_on_one_rank_alone() -> None:
    """On the rank that raised, each forward that comes after says so.

    What it has to drop goes by collectives, in which the others would take no part.
    """
    patience = mock.patch.object(ranks, "collective_timeout", return_value=1)
    with stand_in.deep_compile(), patched(), patience:
        engine = compile_engine(patterns.build("Compiled"), config(3))
        loss = _RefusesAtTheEnd.apply(engine(*inputs(0, 0)))
        if dist.get_rank() == 0:
            engine.backward(loss)
            return
        with pytest.raises(RuntimeError, match="refused at the end"):
            engine.backward(loss)
        words = "a backward raised here, and none on rank 0"
        for _ in range(2):
            with pytest.raises(ds_patches.OtherRankFailed, match=words):
                engine(*inputs(1, 0))


def test_a_rank_that_raised_alone_says_so(fresh_world: World) -> None:
    fresh_world.run(raised_on_one_rank_alone)
