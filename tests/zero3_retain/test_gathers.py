"""Gathers, the prefetcher, and that an ordinary step is stock's."""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from tests.harness import NO_REUSE, SMALL_PREFETCH, Options, run, stock
from tests.harness.models import both_losses
from tests.harness.trainers import EngineTrainer, Parameters, engine_of, engine_trainer
from tests.world import World, on_ranks
from tests.zero3_retain.test_gradients import PREFETCH, patched, several_backwards

#: Stock, or patched.
around = {False: nullcontext, True: patched}


@on_ranks
@pytest.mark.parametrize("settings", [{}, NO_REUSE, PREFETCH], ids=str)
def test_several_backwards_peak_as_one_does(settings: dict[str, Any]) -> None:
    """Most elements gathered in each of two steps."""
    once, thrice = (
        run(
            partial(several_backwards, backwards=backwards),
            Options(zero=settings),
            "zero3_retain",
            looks=["memory"],
            strict=False,
        ).peaks
        for backwards in (1, 3)
    )
    assert 0 < max(thrice) <= max(once)


@on_ranks
@pytest.mark.core_case(settings={})
@pytest.mark.parametrize("settings", [{}, PREFETCH], ids=str)
def test_later_steps_keep_the_trace(settings: dict[str, Any]) -> None:
    """The trace is never invalidated, and complete after the first step."""
    with patched():
        trainer = engine_trainer(steps=1, zero=settings)
        trace = trainer.engine.optimizer.parameter_offload.get_param_coordinator()
        with mock.patch.object(trace, "_invalidate_trace", wraps=trace._invalidate_trace) as spoils:
            for step in range(5):
                trainer.train(several_backwards, backwards=3)
                assert (spoils.call_count, trace.is_complete_trace()) == (0, step > 0)


MODULES_WITH_PARAMETERS = 8  # of TwoHeads, on the way of one loss


@on_ranks
@pytest.mark.parametrize("model", ["TwoHeads", "Reentrant"])
@pytest.mark.parametrize("settings", [SMALL_PREFETCH, PREFETCH], ids=str)
def test_prefetch_serves_the_second_backward_too(settings: dict[str, Any], model: str) -> None:
    """Nor does a graph task that ends inside another one let go of what the other is to use.

    Per backward of the fourth step: modules whose parameters were on their way when needed.
    """
    with patched():
        engine = engine_of(model, zero=settings)
        offload = engine.optimizer.parameter_offload
        stocks = offload.pre_sub_module_backward_function
        counts = [0]

        def look(module: torch.nn.Module) -> None:
            states = {p.ds_status.name for p in module.parameters(recurse=False)}
            counts[-1] += bool(states) and "NOT_AVAILABLE" not in states
            stocks(module)

        class Counting(EngineTrainer):
            def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
                super().backward(loss, retain_graph)
                counts.append(0)

        EngineTrainer(engine).train(several_backwards)
        offload.pre_sub_module_backward_function = look
        Counting(engine, Options(steps=1)).train(several_backwards)
        assert counts[:-1] == [MODULES_WITH_PARAMETERS] * 2


@on_ranks
@pytest.mark.core_case
def test_a_retained_graph_holds_no_weights() -> None:
    """The storage itself; stock's Linear would hold its weight up to 0.19.3."""
    gathered: list[tuple[str, StorageWeakRef]] = []

    def look(module: torch.nn.Module, *_: Any) -> None:
        params = module.parameters(recurse=False)
        storages = [StorageWeakRef(param.data.untyped_storage()) for param in params]
        gathered.extend((type(module).__name__, storage) for storage in storages)

    # What building the model under ``deepspeed.zero.Init`` leaves behind, and later any model.
    linear = torch.nn.functional.linear if stock.LINEAR_SAVES_NO_WEIGHT else zero3_linear_wrap
    with patched(), mock.patch.object(torch.nn.functional, "linear", linear):
        engine = engine_of()
        for module in engine.module.modules():
            module.register_forward_pre_hook(look)
        first, second = both_losses(engine, 0)
        engine.backward(first, retain_graph=True)
        held = {kind for kind, storage in gathered if not storage.expired()}
        engine.backward(second)
    assert len(gathered) > 10
    assert not held


# --- A step that retains nothing does what stock does; its time is measured in benchmarks/ --------


def ordinary_steps(
    patch: bool, model: str, stage: int, micro_steps: int
) -> tuple[Counter[str], list[list[str]], Parameters]:
    """Collectives of three ordinary steps, what stayed gathered, and where they led.

    A step before them records the prefetch trace. In it, stock keeps a module that is called
    several times gathered from its first backward on; here it is released between its calls.
    """
    with around[patch]():
        trainer = engine_trainer(model, stage=stage, micro_steps=micro_steps)
        trainer.count = 1
        trainer.train(several_backwards, backwards=1)
        trainer.count = 3
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            trainer.train(several_backwards, backwards=1)
        names = (event.name for event in recorded.events())
        collectives = Counter(name for name in names if name.startswith("c10d::"))
        return collectives, trainer.available, trainer.parameters()


@on_ranks
@pytest.mark.core_case(model="TwoHeads")
@pytest.mark.parametrize(
    ("model", "stage", "micro_steps"),
    [("TwoHeads", 3, 1), ("SharedBlock", 3, 2), ("Reentrant", 3, 1), ("TwoHeads", 1, 1)],
)
def test_ordinary_steps_are_stocks_to_the_bit(model: str, stage: int, micro_steps: int) -> None:
    before, after = (ordinary_steps(patch, model, stage, micro_steps) for patch in (False, True))
    assert before[0].total() > 0, "no collective was seen: the test looks in the wrong place"
    # At stage 1 each says whether a rank has come to the head that none has used so far.
    asked = 0 if stage == 3 else 3 * micro_steps
    assert after[0] == before[0] + Counter({"c10d::allreduce_": asked})
    for ours, stocks in zip(after[1], before[1], strict=True):
        # Fewer is fine: up to 0.19.2 stock leaves the first layer gathered after a backward.
        assert set(ours) <= set(stocks)
        assert ours == stocks or stock.Version("0.19.3") > stock.RELEASE
    for name, value in before[2].items():
        assert torch.equal(after[2][name], value), name


# --- Engines whose modules Dynamo compiles: the boundaries are traced as stock's Functions are ----


class CompiledBlocks(EngineTrainer):
    def __init__(self, engine: Any, *arguments: Any) -> None:
        for block in engine.module.blocks:
            block.compile(backend="eager")
        super().__init__(engine, *arguments)


def compiled(patch: bool, backwards: int) -> tuple[int, int]:
    """How often Dynamo compiled and broke a graph."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    script = partial(several_backwards, backwards=backwards)
    outcome = run(script, Options(), *(["zero3_retain"] if patch else []), engine=CompiledBlocks)
    assert outcome.equal, outcome
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.exhaustive
@pytest.mark.skipif(not stock.TORCH_STYLE, reason="tried on 0.18.3 and later only")
def test_compiled_blocks(world: World) -> None:
    patient = world.within(300)
    stocks, *ours = (patient.run(compiled, *case) for case in ((False, 1), (True, 1), (True, 2)))
    for (graphs, breaks), *others in zip(stocks, *ours, strict=True):
        assert graphs > 0
        assert all(more <= graphs and broken <= breaks for more, broken in others)
