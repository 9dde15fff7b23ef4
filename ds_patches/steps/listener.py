"""The base of what patches do at the backwards of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Listener:
    """What a patch does at an engine's backwards. A method does nothing unless overridden."""

    #: Whether `backward_begins` is to be called.
    awaits_backwards = True

    def backward_begins(self, again: bool) -> None:
        """A backward begins; its graph task runs. `again`: no forward has run since the last."""

    def backward_by(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs ``engine.backward(loss)``: `run`, or something around it."""
        return run

    def backward_nested(self) -> None:
        """A backward over a forward of the engine begins inside the running one."""

    def backward_raised(self) -> None:
        """A backward raised; whether `dropped` follows depends on what it had brought."""

    def dropped(self, failed: bool) -> None:
        """The step's gradients were dropped: by the user, or because a backward `failed`."""
