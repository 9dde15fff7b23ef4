"""The base class of the patches' callbacks at the backwards of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Listener:
    """Callbacks at an engine's backwards. They do nothing unless overridden."""

    #: True if `backward_begins` is to be called.
    awaits_backwards = True

    def backward_begins(self, same_forward: bool) -> None:
        """Called in the graph task of a backward that begins.

        same_forward: no forward has run since the last backward.
        """

    def wrap_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that runs ``engine.backward(loss)``: `run`, or a wrapper of it."""
        return run

    def backward_nested(self) -> None:
        """Called when a backward over a forward of the engine begins inside the running one."""

    def backward_raised(self) -> None:
        """Called after a backward raised; then `gradients_dropped` if it had brought gradients."""

    def gradients_dropped(self, failed: bool) -> None:
        """Called when the step's gradients were dropped: by the user, or as a backward `failed`."""
