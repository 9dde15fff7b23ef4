"""The wrappers around DeepSpeed's methods. An engine is known only while it is in a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from ds_patches.core import live

from . import lost, micro_steps
from . import window as windows
from .no_sync import MicroStepsByEngine, StepChoice
from .upstream import engine as upstream_engine
from .upstream import flat
from .window import Choice

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


_choice = Choice()
_micro_steps = MicroStepsByEngine()
_adds_micro_steps = True
_warns_of_lost = True


def activate(release: Any, options: Mapping[str, str]) -> Sequence[str]:
    """Take the options. Raises ValueError if the native method is asked for where there is none."""
    global _choice, _adds_micro_steps, _warns_of_lost
    from deepspeed.runtime.engine import DeepSpeedEngine

    _choice = Choice(
        native=options["implementation"] == "native",
        handshake=options["handshake"],
        scatters=options["flush"] == "reduce_scatter",
    )
    method = live.innermost(DeepSpeedEngine.coalesce_grad_reduction)
    if _choice.native and isinstance(method, live.Absent):
        raise ValueError(f"DeepSpeed {release} has no coalesce_grad_reduction of its own (0.19.1)")
    if _choice.native and (options["no_sync"] == "on" or options["lost_gradients"] == "accumulate"):
        raise ValueError(
            "no_sync=on and lost_gradients=accumulate need implementation=ours: the native method "
            "keeps gradients in the same place"
        )
    _adds_micro_steps = options["micro_steps"] == "added"
    _warns_of_lost = options["lost_gradients"] == "warn"
    _micro_steps.choose(
        StepChoice(
            no_sync=options["no_sync"] == "on",
            accumulates=options["lost_gradients"] == "accumulate",
            scatters=_choice.scatters,
        )
    )
    return []


def deactivate() -> Sequence[str]:
    """Leave every engine to stock."""
    _micro_steps.let_go()
    lost.let_go()
    return []


# --- DeepSpeedEngine ----------------------------------------------------------------------------


def around_coalesce(
    wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs
) -> AbstractContextManager[None]:
    """Reduce the gradients of several backwards at once; see ``ds_patches.coalesce``."""
    if _choice.native:
        context: AbstractContextManager[None] = wrapped(*args, **kwargs)
        return context
    return _coalesce(engine, *args, **kwargs)


def _coalesce(
    engine: Any, *, num_backwards: int | None = None, gather_once: bool = False
) -> AbstractContextManager[None]:
    window = windows.window(engine, num_backwards, gather_once, _choice)
    steps = _micro_steps.of(engine)
    return window if steps is None else steps.noting(window)


def around_backward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    if (window := windows.of(engine)) is not None:
        with window.backward():
            return wrapped(*args, **kwargs)
    if (steps := _micro_steps.meet(engine)) is not None:
        with steps.backward():
            return wrapped(*args, **kwargs)
    return wrapped(*args, **kwargs)


def around_prologue(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    if (window := windows.of(engine)) is not None:
        window.backward_begins()
    elif (steps := _micro_steps.meet(engine)) is not None:
        steps.backward_begins()
    return wrapped(*args, **kwargs)


def around_epilogue(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    result = wrapped(*args, **kwargs)
    if (window := windows.of(engine)) is not None:
        window.backward_ends()
    return result


def around_set_boundary(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    result = wrapped(*args, **kwargs)
    if (window := windows.of(engine)) is not None:
        window.boundary_is_set(bool(engine._is_gradient_accumulation_boundary))
    return result


def around_allreduce(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    if windows.of(engine) is not None:
        return None
    steps = _micro_steps.of(engine)
    if steps is not None and steps.ends_without_reduction():
        return None
    result = wrapped(*args, **kwargs)
    lost.backward_ended(engine.optimizer)
    return result


def around_step(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    assert windows.of(engine) is None, (
        "engine.step() inside coalesce_grad_reduction(): nothing is reduced yet. Step after the "
        "block."
    )
    steps = _micro_steps.of(engine)
    steps_now = upstream_engine.steps_now(engine)
    with nullcontext() if steps is None else steps.step():
        result = wrapped(*args, **kwargs)
    if steps_now:
        lost.forget(engine.optimizer)
    return result


def around_no_sync(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    steps = _micro_steps.meet(engine)
    if steps is None or not steps.unsynced:
        return wrapped(*args, **kwargs)
    return steps.no_sync()


def around_zero_grad(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    result = wrapped(*args, **kwargs)
    _forget_gradients(engine.optimizer)
    return result


def _forget_gradients(optimizer: Any) -> None:
    if (steps := _micro_steps.of(optimizer)) is not None:
        steps.zero_grad()
    lost.forget(optimizer)


# --- ZeRO ---------------------------------------------------------------------------------------


def around_gradient(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """What a parameter's hook calls: in a window its gradient stays where it is."""
    if (window := windows.of(optimizer)) is not None:
        return window.gradient_arrives(*args, **kwargs)
    steps = _micro_steps.of(optimizer)
    if steps is not None and steps.keeps_gradient():
        return None
    return wrapped(*args, **kwargs)


def around_flat_epilogue(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    if _adds_micro_steps and flat.forgets_micro_steps(optimizer):
        wrapped = partial(micro_steps.epilogue_with_earlier, wrapped, optimizer)
    with flat.in_epilogue(optimizer):
        return lost.of(optimizer).flat_epilogue(wrapped) if _warns_of_lost else wrapped()


def around_optimizers_zero_grad(
    wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs
) -> Any:
    result = wrapped(*args, **kwargs)
    if not flat.is_in_epilogue(optimizer):
        _forget_gradients(optimizer)
    return result


def around_partition(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    if _warns_of_lost:
        lost.of(optimizer).partition(args[0] if args else kwargs["params_to_release"])
    return wrapped(*args, **kwargs)


def around_all_grad_tensors(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    if _adds_micro_steps and flat.forgets_micro_steps(optimizer):
        return micro_steps.add_to_earlier(wrapped, optimizer, *args, *kwargs.values())
    return wrapped(*args, **kwargs)
