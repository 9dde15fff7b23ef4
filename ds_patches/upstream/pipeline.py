"""Pipelines: the backwards of their stages, which are none of a script's. 0.18.3 and later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_patches.core.calls import meanwhile


def runs_engine_backward(engine: Any) -> bool:
    """Whether the engine knows that the backward which runs is one of its own."""
    return bool(engine._running_engine_backward)


@contextmanager
def as_engine_backward(engine: Any, *, is_scaled: bool = False) -> Iterator[None]:
    """Let the engine take what runs inside for a backward of its own.

    is_scaled: its loss was multiplied by the loss scale, as a plain backward in fp16 has to be.
    """
    if is_scaled:
        engine._manual_backward_expected = True
    with meanwhile(engine, _running_engine_backward=True):
        yield
