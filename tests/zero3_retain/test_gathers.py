"""What is gathered when, and what the prefetcher makes of it."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch.multiprocessing.reductions import StorageWeakRef

from tests.scripts import losses
from tests.training import stock
from tests.training.models import both_losses
from tests.training.options import NO_REUSE, SMALL_PREFETCH, Options
from tests.training.run import check, measure
from tests.training.trainers import EngineTrainer, engine_of, engine_trainer
from tests.world import World
from tests.zero3_retain.test_gradients import patched, several_backwards

SETTINGS = pytest.mark.parametrize(
    "settings", [{}, SMALL_PREFETCH, {**NO_REUSE, **SMALL_PREFETCH}], ids=str
)


@pytest.mark.core_case(style="engine", settings=SMALL_PREFETCH)
@pytest.mark.parametrize("style", ["engine", "torch"])
@SETTINGS
def test_nothing_is_on_its_way_after_a_backward_that_leaves_a_branch_out(
    world: World, style: str, settings: dict[str, Any]
) -> None:
    """What the prefetcher fetches for a branch that is not run is let go of, too."""
    script = losses.three_backwards
    options = Options(model="TwoBranches", style=style, steps=5, zero=settings)
    for outcome in check(world, script, options, "zero3_retain"):
        assert len(outcome.left) == 15
        assert not any(outcome.left), outcome.left


def peaks(backwards: int, settings: dict[str, Any]) -> list[int]:
    """Most elements gathered in each of two steps."""
    script = partial(several_backwards, backwards=backwards)
    options = Options(zero=settings)
    return measure(script, options, patched(), looks=["memory"], strict=False).peaks


@pytest.mark.parametrize("settings", [{}, NO_REUSE, {**NO_REUSE, **SMALL_PREFETCH}], ids=str)
def test_several_backwards_peak_as_one_does(world: World, settings: dict[str, Any]) -> None:
    ordinary = world.run(peaks, 1, settings)
    for once, thrice in zip(ordinary, world.run(peaks, 3, settings), strict=True):
        assert 0 < max(thrice) <= max(once)


def trace_of_steps(steps: int, backwards: int, settings: dict[str, Any]) -> list[tuple[int, bool]]:
    """After each step: times the trace was invalidated so far, and whether it is complete."""
    with patched():
        trainer = engine_trainer(steps=1, zero=settings)
        trace = trainer.engine.optimizer.parameter_offload.get_param_coordinator()
        seen = []
        with mock.patch.object(trace, "_invalidate_trace", wraps=trace._invalidate_trace) as spoils:
            for _ in range(steps):
                several_backwards(trainer, backwards=backwards)
                seen.append((spoils.call_count, trace.is_complete_trace()))
        return seen


@pytest.mark.core_case(settings={})
@pytest.mark.parametrize("settings", [{}, {**NO_REUSE, **SMALL_PREFETCH}], ids=str)
def test_later_steps_keep_the_trace(world: World, settings: dict[str, Any]) -> None:
    for seen in world.run(trace_of_steps, 5, 3, settings):
        assert seen == [(0, False), *[(0, True)] * 4]


def prefetched_in_last_step(model: str, settings: dict[str, Any]) -> list[int]:
    """Per backward of the fourth step: modules whose parameters were on their way when needed."""
    with patched():
        engine = engine_of(model, zero=settings)
        offload = engine.optimizer.parameter_offload
        stock = offload.pre_sub_module_backward_function
        counts = [0]

        def look(module: torch.nn.Module) -> None:
            states = {p.ds_status.name for p in module.parameters(recurse=False)}
            counts[-1] += bool(states) and "NOT_AVAILABLE" not in states
            stock(module)

        class Counting(EngineTrainer):
            def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
                super().backward(loss, retain_graph)
                counts.append(0)

        several_backwards(EngineTrainer(engine))
        offload.pre_sub_module_backward_function = look
        several_backwards(Counting(engine, Options(steps=1)))
        return counts[:-1]


MODULES_WITH_PARAMETERS = 8  # of TwoHeads, on the way of one loss


@pytest.mark.parametrize("model", ["TwoHeads", "Reentrant"])
@pytest.mark.parametrize("settings", [SMALL_PREFETCH, {**NO_REUSE, **SMALL_PREFETCH}], ids=str)
def test_prefetch_serves_the_second_backward_too(
    world: World, settings: dict[str, Any], model: str
) -> None:
    """Nor does a graph task that ends inside another one let go of what the other is to use."""
    for first, second in world.run(prefetched_in_last_step, model, settings):
        assert first == second == MODULES_WITH_PARAMETERS


def weights_a_retained_graph_holds() -> tuple[int, set[str]]:
    """Gathered weights seen, and the kinds of module whose weights outlive a retained backward."""
    linear = torch.nn.functional.linear
    with patched():
        if not stock.LINEAR_SAVES_NO_WEIGHT:
            # What building the model under ``deepspeed.zero.Init`` leaves behind.
            torch.nn.functional.linear = zero3_linear_wrap
        try:
            engine = engine_of()
            gathered: list[tuple[str, StorageWeakRef]] = []

            def look(module: torch.nn.Module, *_: Any) -> None:
                gathered.extend(
                    (type(module).__name__, StorageWeakRef(param.data.untyped_storage()))
                    for param in module.parameters(recurse=False)
                )

            for module in engine.module.modules():
                module.register_forward_pre_hook(look)
            first, second = both_losses(engine, 0)
            engine.backward(first, retain_graph=True)
            held = {kind for kind, storage in gathered if not storage.expired()}
            engine.backward(second)
            return len(gathered), held
        finally:
            torch.nn.functional.linear = linear


@pytest.mark.core_case
def test_a_retained_graph_holds_no_weights(world: World) -> None:
    """The storage itself; stock's Linear would hold its weight up to 0.19.3."""
    for seen, held in world.run(weights_a_retained_graph_holds):
        assert seen > 10
        assert not held
