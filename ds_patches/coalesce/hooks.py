"""The wrappers around DeepSpeed's methods. An engine is known only while it is in a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ds_patches.core import live

from . import window as windows
from .window import Choice

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


_choice = Choice()


def activate(release: Any, options: Mapping[str, str]) -> Sequence[str]:
    """Take the options. Raises ValueError if the native method is asked for where there is none."""
    global _choice
    from deepspeed.runtime.engine import DeepSpeedEngine

    _choice = Choice(
        native=options["implementation"] == "native",
        handshake=options["handshake"],
        scatters=options["flush"] == "reduce_scatter",
    )
    method = live.innermost(DeepSpeedEngine.coalesce_grad_reduction)
    if _choice.native and isinstance(method, live.Absent):
        raise ValueError(f"DeepSpeed {release} has no coalesce_grad_reduction of its own (0.19.1)")
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
    return windows.window(engine, num_backwards, gather_once, _choice)


def around_backward(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    if (window := windows.of(engine)) is None:
        return wrapped(*args, **kwargs)
    with window.backward(engine):
        return wrapped(*args, **kwargs)


def around_prologue(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    if (window := windows.of(engine)) is not None:
        window.backward_begins()
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
    return wrapped(*args, **kwargs) if windows.of(engine) is None else None


def around_step(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    assert windows.of(engine) is None, (
        "engine.step() inside coalesce_grad_reduction(): nothing is reduced yet. Step after the "
        "block."
    )
    return wrapped(*args, **kwargs)


# --- ZeRO ---------------------------------------------------------------------------------------


def around_gradient(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """What a parameter's hook calls: in a window its gradient stays where it is."""
    if (window := windows.of(optimizer)) is None:
        return wrapped(*args, **kwargs)
    return window.gradient_arrives(*args, **kwargs)
