"""Stage 3 with ``gather_once=True``: all parameters are gathered when a window opens.

They stay so until it closes, so its forwards and backwards need none of the module hooks that
gather and release, and run as those of a plain module do. The price is a whole copy of the
parameters, in their own precision, on every rank.
"""

from __future__ import annotations

from typing import Any

from .suspended_hooks import SuspendedHooks
from .upstream import engine as upstream_engine
from .upstream import gathers


class GatherOnce:
    """Of one engine, from the begin of a window to its end."""

    def __init__(self, engine: Any) -> None:
        self._offload = gathers.offload_of(engine)
        self._params = gathers.parameters(self._offload)
        self._hooks: SuspendedHooks | None = None
        self._again: Any = None

    @staticmethod
    def must_be_covered(engine: Any) -> None:
        """Raise NotImplementedError where gathering once is not known to be right."""
        if not upstream_engine.partitions_parameters(engine):
            raise NotImplementedError(
                "gather_once needs ZeRO stage 3: below it nothing is gathered"
            )
        if gathers.has_secondary_partitions(engine):
            raise NotImplementedError("gather_once does not cover zero_hpz_partition_size > 1")
        if gathers.keeps_parameters_on_nvme(engine):
            raise NotImplementedError("gather_once does not cover parameters on NVMe")

    def begin(self) -> None:
        """Gather, and take the hooks away. A collective."""
        # A backward over a forward from before the window still releases what it has used.
        gathers.hold(self._params)
        gathers.gather(self._offload, self._params)
        gathers.suspend_trace(self._offload)
        self._hooks = SuspendedHooks(gathers.hook_handles(self._offload))
        # Whoever partitions everything, to save a checkpoint say, finds nobody who gathers again.
        self._again = self._offload.module.register_forward_pre_hook(self._gather_again)

    def end(self) -> None:
        """Put the hooks back, and hold nothing any more; what is gathered stays so."""
        if self._hooks is not None:
            self._again.remove()
            self._hooks.restore()
            self._hooks = None
        gathers.resume_trace(self._offload)
        gathers.allow_release(self._params)

    def release(self) -> None:
        """Partition what the window had gathered."""
        gathers.release(self._offload)

    def _gather_again(self, *_: Any) -> None:
        gathers.gather(self._offload, self._params)
