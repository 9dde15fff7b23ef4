"""Stage 3 with ``gather_once=True``: all parameters are gathered when a window opens.

They stay so until it closes, so its forwards and backwards need none of the module hooks that
gather and release, and run as those of a plain module do.
"""

from __future__ import annotations

from typing import Any

from .suspended_hooks import SuspendedHooks
from .upstream import gathers


class GatherOnce:
    """Of one engine, from the begin of a window to its end."""

    def __init__(self, engine: Any) -> None:
        self._offload = engine.optimizer.parameter_offload
        self._params = gathers.parameters(self._offload)
        self._hooks: SuspendedHooks | None = None
        self._again: Any = None

    def begin(self) -> None:
        """Gather, and take the hooks away. A collective."""
        # A backward over a forward from before the window still releases what it has used.
        gathers.hold(self._offload, self._params)
        gathers.gather(self._offload, self._params)
        offload = self._offload
        self._hooks = SuspendedHooks([*offload.forward_hooks, *offload.backward_hooks])
        # Whoever partitions everything, to save a checkpoint say, finds nobody who gathers again.
        self._again = self._offload.module.register_forward_pre_hook(
            lambda *_: gathers.gather(self._offload, self._params)
        )

    def end(self) -> None:
        """Put the hooks back, and hold nothing any more; what is gathered stays so."""
        if self._hooks is not None:
            self._again.remove()
            self._hooks.restore()
            self._hooks = None
        gathers.let_go(self._offload, self._params)

    def release(self) -> None:
        """Partition what the window had gathered."""
        gathers.release(self._offload)
