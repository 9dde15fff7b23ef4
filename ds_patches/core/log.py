"""How loud the package is, in a program that has not set up logging."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

ours = logging.getLogger("ds_patches")
#: Of a list in a message.
_NAMED = 3
LEVELS = ("debug", "info", "warning", "error", "critical")


def say(level: str | None = None) -> None:
    """Speak, on stderr until the program sets up logging: from `level` on.

    Without a level it is what the logger has, or else info: what is live is said once per engine.
    """
    if level is not None or ours.level == logging.NOTSET:
        ours.setLevel((level or "info").upper())
    if not any(isinstance(handler, _Stderr) for handler in ours.handlers):
        ours.addHandler(_Stderr())


def for_the_job() -> int:
    """Return the level of what every rank would say: one says it. If ranks differ, they refuse."""
    ranks = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    rank = next((os.environ[name] for name in ranks if name in os.environ), "0")
    return logging.WARNING if rank == "0" else logging.DEBUG


def named(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Speaks while nobody else does; Python's own last resort shows warnings only."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        others = [*ours.handlers, *logging.getLogger().handlers]
        if others == [self]:
            self.stream = sys.stderr  # of now: a notebook or a test puts another in its place
            super().emit(record)
