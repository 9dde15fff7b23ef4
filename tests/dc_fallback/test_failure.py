"""After an exception the next step is right, and nothing stays gathered."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_patches
from ds_patches.dc_fallback.upstream import engine as upstream_engine
from ds_patches.runtime import ranks
from tests.dc_fallback import patterns, stand_in
from tests.dc_fallback.patterns import inputs
from tests.dc_fallback.run import EXACT, loop, patched, trains
from tests.listening import listening
from tests.training.options import Options, config
from tests.training.surroundings import compile_engine
from tests.training.trainers import EngineTrainer, PlainTrainer, worst_difference
from tests.world import World


class _Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("refused in the backward")


@torch.compiler.disable
def refuse(module: Any, args: Any, output: Tensor) -> Tensor:
    if getattr(module, "refuses", None) == "forward":
        raise RuntimeError("refused in the forward")
    if getattr(module, "refuses", None) == "backward":
        return _Refuses.apply(output)  # type: ignore[no-any-return]
    return output


def refusing(trainer: Any, where: str, layer: int, at_step: int) -> None:
    """A script with a batch that fails and is left out, on every rank."""
    chosen = trainer.module.layers[layer]
    chosen.register_forward_hook(refuse)
    if trainer.is_engine:
        trainer.note()  # the hook
    for step in trainer.steps():
        if step == at_step:
            chosen.refuses = where
            with pytest.raises(RuntimeError, match="refused"):
                trainer.backward(trainer(*inputs(step, 1)))
            chosen.refuses = None
            trainer.module.zero_grad()
            if trainer.is_engine:
                trainer.leaves_nothing()
        trainer.backward(trainer(*inputs(step, 0)))
        trainer.step()


@pytest.mark.parametrize("at_step", [0, 2])
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("pattern", ["Disabled", "Whole", "Mixed"])
def test_the_next_step_is_right(
    world: World, pattern: str, where: str, layer: int, at_step: int
) -> None:
    script = partial(refusing, where=where, layer=layer, at_step=at_step)
    outcome, _ = trains(world, pattern, script, steps=4)
    told = any("A backward raised" in line for line in outcome.said)
    assert told == (where == "backward")


def applied_late() -> tuple[float, Any, list[str]]:
    """Applied when the engine has been compiled and has run."""
    start = patterns.build("Compiled")
    plain = PlainTrainer(deepcopy(start), Options())
    loop(plain)
    with stand_in.deep_compile(), listening() as heard:
        trainer = EngineTrainer(compile_engine(start, config(3)))
        for step in range(3):
            if step == 1:
                notes = ds_patches.apply("dc_fallback").notes
            trainer.backward(trainer(*inputs(step, 0)))
            trainer.step()
        ds_patches.unapply("dc_fallback")
        difference = worst_difference(trainer.parameters(), plain.parameters())[0]
        return difference, notes, heard


def test_applied_late(world: World) -> None:
    difference, notes, heard = world.run(applied_late)[0]
    assert difference <= EXACT
    assert list(notes) == ["1 engine(s) compiled before: left to stock DeepSpeed"]
    assert any("it was compiled before the patch was applied" in line for line in heard)


def taken_back() -> float:
    """Taken back when the engine has run, and applied again."""
    start = patterns.build("Compiled")
    plain = PlainTrainer(deepcopy(start), Options())
    loop(plain)
    with stand_in.deep_compile(), patched():
        trainer = EngineTrainer(compile_engine(start, config(3)))
        for step in range(3):
            if step == 1:
                ds_patches.unapply("dc_fallback")
            if step == 2:
                ds_patches.apply("dc_fallback")
            loss = trainer(*inputs(step, 0))
            trainer.note()  # the hooks of a patch come and go with it, the first forward after it
            trainer.backward(loss)
            trainer.step()
        return worst_difference(trainer.parameters(), plain.parameters())[0]


def test_taken_back_and_applied_again(world: World) -> None:
    assert max(world.run(taken_back)) <= EXACT


def without_optimizer() -> bool:
    """An engine that trains nothing is left to stock."""
    import deepspeed

    settings = {**config(3), "compile": {"deepcompile": True}}
    with stand_in.deep_compile(), patched():
        engine, *_ = deepspeed.initialize(model=patterns.build("Compiled"), config=settings)
        return upstream_engine.wants_deep_compile(engine)


def test_an_engine_without_an_optimizer(world: World) -> None:
    assert world.run(without_optimizer) == [False, False]


def what_is_left() -> dict[str, Any]:
    with stand_in.deep_compile():
        start = patterns.build("Disabled")
        with patched():
            engine = compile_engine(start, config(3))
            inside = {type(module._parameters).__name__ for module in engine.module.modules()}
            engine.backward(engine(*inputs(0, 0)))
            engine.step()
        modules, launch = list(engine.module.modules()), engine.launch_compile_passes
        return {
            "inside": inside,
            "containers": {type(module._parameters).__name__ for module in modules},
            "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules),
            "attributes": [name for name in vars(engine) if "ds_patches" in name],
            "launch": getattr(launch, "func", launch).__name__,
            "native": getattr(engine, "_deepcompile_z3_eager_fallback", "none") is not None,
        }


def test_unapply_leaves_the_engine_as_deepcompile_made_it(world: World) -> None:
    left = world.run(what_is_left)[0]
    assert left["inside"] == {"WatchedParameters"}
    assert "WatchedParameters" not in left["containers"]
    assert left["hooks"] == 0
    assert not left["attributes"]
    assert left["launch"] == "_launch_passes"
    assert left["native"]


class _RefusesAtTheEnd(_Refuses):
    """Of one rank alone, when all that its backward sends has been sent."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        def refuse() -> None:
            raise RuntimeError("refused at the end of the backward")

        if dist.get_rank() == 1:
            torch.autograd.Variable._execution_engine.queue_callback(refuse)
        return grad


def raised_on_one_rank_alone() -> list[str]:
    """What each forward says that comes after, on the rank that raised."""
    said = []
    with (
        stand_in.deep_compile(),
        patched(),
        mock.patch.object(ranks, "patience", return_value=1),
    ):
        trainer = EngineTrainer(compile_engine(patterns.build("Compiled"), config(3)))
        loss = _RefusesAtTheEnd.apply(trainer(*inputs(0, 0)))
        if dist.get_rank() == 0:
            trainer.backward(loss)
            return []
        with pytest.raises(RuntimeError, match="refused at the end"):
            trainer.backward(loss)
        for _ in range(2):
            with pytest.raises(ds_patches.OtherRankFailed) as raised:
                trainer(*inputs(1, 0))
            said.append(str(raised.value))
    return said


def test_a_rank_that_raised_alone_says_so(fresh_world: World) -> None:
    """What it has to drop goes by collectives, in which the others would take no part."""
    _, said = fresh_world.run(raised_on_one_rank_alone)
    assert len(said) == 2
    assert all("a backward raised here, and none on rank 0" in text for text in said)
