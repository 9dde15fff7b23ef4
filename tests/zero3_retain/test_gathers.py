"""What is gathered when, and what the prefetcher makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch.multiprocessing.reductions import StorageWeakRef

from tests.world import World
from tests.zero3_retain import models, releases, trainers
from tests.zero3_retain.cases import one_forward_several_backwards, patched, train
from tests.zero3_retain.test_gradients import GRAPHS

NO_REUSE = {"stage3_max_reuse_distance": 0}
SMALL_PREFETCH = {"stage3_prefetch_bucket_size": 600}


@pytest.mark.parametrize("style", ["engine", "scale", "torch"])
@pytest.mark.parametrize("backwards", [1, 2, 4])
def test_nothing_stays_gathered_after_any_backward(
    world: World, style: str, backwards: int
) -> None:
    releases.needs_torch_style(style)
    for result in world.run(train, style=style, backwards=backwards, steps=4):
        assert len(result.available) == 4 * backwards
        gathered = result.available if backwards > 1 else []
        assert not any(gathered), result.available


@pytest.mark.parametrize("graph", GRAPHS)
def test_nothing_stays_gathered_whatever_the_graph(world: World, graph: str) -> None:
    for result in world.run(train, graph, backwards=3, steps=4):
        assert not any(result.available), result.available


class TwoBranches(models.TwoHeads):
    """Each head has a trunk of its own."""

    def forward(self, tokens: torch.Tensor) -> models.Losses:
        x = self.embed(tokens)
        return models.Losses(self.classify(self.blocks[0](x)), self.rebuild(self.blocks[1](x)))


def gathered(engine: Any) -> list[str]:
    """Names of parameters that are whole, or on their way to be."""
    return [
        name
        for name, param in engine.module.named_parameters()
        if param.ds_status.name != "NOT_AVAILABLE"
    ]


def whole_after_backwards(style: str, settings: dict[str, Any]) -> list[list[str]]:
    """After each of three backwards over a forward, the second of which uses one branch alone."""
    with patched():
        model = models.build(TwoBranches)
        trainer = trainers.EngineTrainer(
            trainers.build_engine(model, trainers.config(3, zero=settings)), style
        )
        seen = []
        for step in range(5):
            tokens, classes = models.batch(step)
            first, second = models.losses(trainer.forward(tokens), classes)
            for index, loss in enumerate((first + second, first, second)):
                trainer.backward(loss, retain_graph=index < 2)
                seen.append(gathered(trainer.engine))
            trainer.step()
        return seen


@pytest.mark.core_case(style="engine", settings=SMALL_PREFETCH)
@pytest.mark.parametrize("style", ["engine", "torch"])
@pytest.mark.parametrize("settings", [{}, SMALL_PREFETCH, {**NO_REUSE, **SMALL_PREFETCH}], ids=str)
def test_nothing_is_on_its_way_after_a_backward_that_leaves_a_branch_out(
    world: World, style: str, settings: dict[str, Any]
) -> None:
    """What the prefetcher fetches for a branch that is not run is let go of, too."""
    releases.needs_torch_style(style)
    for seen in world.run(whole_after_backwards, style, settings):
        assert len(seen) == 15
        assert not any(seen), seen


def gathered_numel(engine: Any) -> int:
    return sum(
        param.ds_numel
        for param in engine.module.parameters()
        if param.ds_status.name != "NOT_AVAILABLE"
    )


def peaks(backwards: int, settings: dict[str, Any]) -> list[int]:
    """Most elements gathered during each of four steps, seen at every parameter's gradient."""
    with patched():
        model = models.build(models.TwoHeads)
        engine = trainers.build_engine(model, trainers.config(3, zero=settings))
        seen = [0]

        def look(*_: Any) -> None:
            seen[-1] = max(seen[-1], gathered_numel(engine))

        for module in model.modules():
            module.register_forward_hook(look)
            module.register_full_backward_hook(look)
        trainer = trainers.EngineTrainer(engine)
        for _ in range(4):
            one_forward_several_backwards(trainer, backwards=backwards, steps=1)
            seen.append(0)
        return seen[:-1]


@pytest.mark.parametrize("settings", [{}, NO_REUSE, {**NO_REUSE, **SMALL_PREFETCH}], ids=str)
def test_peak_of_the_window_is_one_backwards(world: World, settings: dict[str, Any]) -> None:
    ordinary = world.run(peaks, 1, settings)
    for once, thrice in zip(ordinary, world.run(peaks, 3, settings), strict=True):
        # The first step has no trace, the second none that fits.
        assert max(thrice[2:]) <= max(once[2:])


class Trace:
    """Counts what an engine's coordinator does to its trace."""

    def __init__(self, engine: Any) -> None:
        self.coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        self.invalidated = 0
        stock = self.coordinator._invalidate_trace

        def invalidate() -> None:
            self.invalidated += 1
            stock()

        self.coordinator._invalidate_trace = invalidate


def trace_of_steps(steps: int, backwards: int, settings: dict[str, Any]) -> list[tuple[int, bool]]:
    """After each step: times the trace was invalidated so far, and whether it is complete."""
    with patched():
        model = models.build(models.TwoHeads)
        engine = trainers.build_engine(model, trainers.config(3, zero=settings))
        trace = Trace(engine)
        trainer = trainers.EngineTrainer(engine)
        seen = []
        for _ in range(steps):
            one_forward_several_backwards(trainer, backwards=backwards, steps=1)
            seen.append((trace.invalidated, trace.coordinator.is_complete_trace()))
        return seen


@pytest.mark.core_case(settings={})
@pytest.mark.parametrize("settings", [{}, {**NO_REUSE, **SMALL_PREFETCH}], ids=str)
def test_later_steps_keep_the_trace(world: World, settings: dict[str, Any]) -> None:
    for seen in world.run(trace_of_steps, 5, 3, settings):
        assert [count for count, _ in seen] == [0] * 5
        assert [complete for _, complete in seen] == [False, True, True, True, True]


def prefetched_in_last_step(settings: dict[str, Any]) -> list[int]:
    """Per backward of the fourth step: modules whose parameters were on their way when needed."""
    with patched():
        model = models.build(models.TwoHeads)
        engine = trainers.build_engine(model, trainers.config(3, zero=settings))
        offload = engine.optimizer.parameter_offload
        stock = offload.pre_sub_module_backward_function
        counts = [0]

        def look(module: torch.nn.Module) -> None:
            states = {p.ds_status.name for p in module.parameters(recurse=False)}
            counts[-1] += bool(states) and "NOT_AVAILABLE" not in states
            stock(module)

        class Counting(trainers.EngineTrainer):
            def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
                super().backward(loss, retain_graph)
                counts.append(0)

        one_forward_several_backwards(trainers.EngineTrainer(engine), backwards=2)
        offload.pre_sub_module_backward_function = look
        one_forward_several_backwards(Counting(engine), backwards=2, steps=1)
        return counts[:-1]


MODULES_WITH_PARAMETERS = 8  # of TwoHeads, on the way of one loss


@pytest.mark.parametrize("settings", [SMALL_PREFETCH, {**NO_REUSE, **SMALL_PREFETCH}], ids=str)
def test_prefetch_serves_the_second_backward_too(world: World, settings: dict[str, Any]) -> None:
    """All but the first module of a backward, which nothing announces, can be on their way."""
    for first, second in world.run(prefetched_in_last_step, settings):
        assert first >= MODULES_WITH_PARAMETERS // 2
        assert second >= MODULES_WITH_PARAMETERS // 2


def weights_a_retained_graph_holds() -> tuple[int, set[str]]:
    """Gathered weights seen, and the kinds of module whose weights outlive a retained backward."""
    linear = torch.nn.functional.linear
    with patched():
        if not releases.LINEAR_SAVES_NO_WEIGHT:
            # What building the model under ``deepspeed.zero.Init`` leaves behind.
            torch.nn.functional.linear = zero3_linear_wrap
        try:
            model = models.build(models.TwoHeads)
            engine = trainers.build_engine(model, trainers.config(3))
            gathered: list[tuple[str, StorageWeakRef]] = []

            def look(module: torch.nn.Module, *_: Any) -> None:
                gathered.extend(
                    (type(module).__name__, StorageWeakRef(param.data.untyped_storage()))
                    for param in module.parameters(recurse=False)
                )

            for module in model.modules():
                module.register_forward_pre_hook(look)
            tokens, classes = models.batch(0)
            first, second = models.losses(engine(tokens), classes)
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
