"""All patches on real engines, beside libraries that wrap methods of theirs, and after them."""

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ref

import pytest

import ds_patches
from ds_patches.core import lifecycle, live
from tests.harness import models
from tests.harness.models import loss_of
from tests.harness.options import BF16_SUMS, OFFLOADED, OVERLAP, Options
from tests.harness.run import Outcome, measure
from tests.harness.trainers import engine_of
from tests.scripts import accumulating, by_hand, evaluating, nested, ordinary
from tests.world import World, on_ranks


@contextmanager
def all_patches() -> Iterator[None]:
    ds_patches.apply_all()
    try:
        yield
    finally:
        ds_patches.unapply_all()


# --- A library wraps methods of an engine ---------------------------------------------------------


def profile(engine: Any) -> list[tuple[Any, str, Any]]:
    """As a profiler does, keep each wrapper of ours, and call it; return what was where.

    It keeps them where nobody sees that they are called.
    """
    owners = [engine, engine.optimizer]
    if hasattr(engine.optimizer, "parameter_offload"):
        owners.append(engine.optimizer.parameter_offload.get_param_coordinator())
    values = [(owner, *item) for owner in owners for item in vars(owner).items()]
    places = [place for place in values if live.layer_of(place[2])]
    for owner, name, ours in places:
        setattr(owner, name, lambda *args, ours=ours, **kwargs: ours(*args, **kwargs))
    return places


def beside_a_profiler(trainer: Any) -> None:
    """A profiler wraps our wrappers, which go, come over it, and go again after it."""
    before: list[tuple[Any, str, Any]] = []
    for step in trainer.steps():
        event = step if trainer.is_engine else None
        if event in (3, 6):
            ds_patches.unapply_all()
        if event == 4:
            ds_patches.apply_all()
        if event == 5:
            for place in before:
                setattr(*place)
        with trainer.window() if event == 1 else nullcontext():
            trainer.backward(loss_of(trainer, step))
            if event == 1:
                before = profile(trainer.engine)
                assert before, "nothing of ours is at this engine: the test looks elsewhere"
        trainer.step()


def company(options: Options) -> Outcome:
    with all_patches():
        outcome = measure(beside_a_profiler, options, strict=False)
        ds_patches.apply_all()
        return outcome


@pytest.mark.core_case(stage=2, more={})
@pytest.mark.parametrize(
    "more", [{}, OFFLOADED, OVERLAP, BF16_SUMS], ids=["", "offloaded", "overlap", "sums"]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_wrappers_come_and_go_beneath_a_profiler(
    world: World, stage: int, more: dict[str, Any]
) -> None:
    if more is BF16_SUMS and stage == 1:
        pytest.skip("BF16_Optimizer has no block")
    for outcome in world.run(company, Options(stage, steps=8, **more)):
        assert outcome.equal, outcome


# --- Arguments by name ----------------------------------------------------------------------------


@contextmanager
def called_by_name() -> Iterator[set[str]]:
    """Calls of every wrapped function give all arguments by name, the last first.

    Yields the names of those that were called.
    """
    called: set[str] = set()

    def shim(name: str, ours: Any) -> Callable[..., Any]:
        signature = inspect.signature(live.innermost(ours))
        plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        is_plain = all(parameter.kind in plain for parameter in signature.parameters.values())

        def by_name(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            if not is_plain:
                return ours(*args, **kwargs)
            arguments = [*signature.bind(*args, **kwargs).arguments.items()]
            own = [arguments.pop(0)[1]] if arguments and arguments[0][0] == "self" else []
            return ours(*own, **dict(arguments[::-1]))

        return by_name

    journals = [life.journal for life in lifecycle.lifecycles.values()]
    places = {(layer.owner, layer.name) for journal in journals for layer in journal.layers}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for owner, name in places:
            monkeypatch.setattr(owner, name, shim(name, live.raw(owner, name)))
        yield called


@on_ranks
@pytest.mark.parametrize(
    ("script", "stages", "more"),
    [
        (by_hand.given_after_two_micro_steps, (2, 3), {"micro_steps": 2, **OFFLOADED}),
        (accumulating.zeroed_in_the_middle, (1,), {"micro_steps": 2}),
        (nested.cached_in_a_window, (2, 3), {}),
        (evaluating.inference_mode, (3,), evaluating.KEPT),
        (ordinary.micro_steps, (1, 2, 3), {"micro_steps": 2}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_arguments_by_name(script: Any, stages: tuple[int, ...], more: dict[str, Any]) -> None:
    for stage in stages:
        with all_patches(), called_by_name() as called:
            outcome = measure(script, Options(stage, **more), strict=False)
        assert outcome.equal, (stage, outcome)
        assert called


# --- What is left when an engine goes -------------------------------------------------------------


def backward(engine: Any) -> None:
    engine.backward(engine(models.batch(0)[0])[0].sum())


@on_ranks
@pytest.mark.parametrize("more", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize("use", ["ordinary", "checked", "unsynced", "of a block"])
@pytest.mark.parametrize("stage", [1, 2])  # stock frees none of stage 3
def test_an_engine_is_freed(use: str, stage: int, more: dict[str, Any]) -> None:
    """Engine, optimizer and module, after a step of this kind."""
    with all_patches():
        engine = engine_of(stage=stage, **more)
        references = [ref(engine), ref(engine.optimizer), ref(engine.module)]
        if use == "unsynced":
            with engine.no_sync():
                backward(engine)
        check = ds_patches.train_check(engine, action="warn")
        with check if use == "checked" else nullcontext():
            with engine.coalesce_grad_reduction() if use == "of a block" else nullcontext():
                backward(engine)
            engine.step()
        statuses = ds_patches.status().values()
        assert all(status.live for status in statuses if status.state.value == "applied")
        engine.destroy()
        del engine, check
        gc.collect()
        assert [reference() for reference in references] == [None] * 3
