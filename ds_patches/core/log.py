"""The package's logger, and its level in a program that has not configured logging."""

import logging
import os
from collections.abc import Sequence

logger = logging.getLogger("ds_patches")
#: A message names at most this many names of a list.
_NAMED = 3
LEVELS = ("debug", "info", "warning", "error", "critical")


def set_up(level: str | None = None) -> None:
    """Log to stderr from `level` on, until the program configures logging.

    level: None keeps the logger's level; a logger without one logs from "info" on.
    """
    if level is not None or logger.level == logging.NOTSET:
        logger.setLevel((level or "info").upper())
    if _stderr not in logger.handlers:
        logger.addHandler(_stderr)


def level_for_the_job() -> int:
    """Return the level of a warning that every rank would log: lower on all ranks but rank 0."""
    ranks = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    rank = next((os.environ[name] for name in ranks if name in os.environ), "0")
    return logging.WARNING if rank == "0" else logging.DEBUG


def named(names: Sequence[str]) -> str:
    """Return a list for a message: the first three names, and the number of the others."""
    suffix = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + suffix


#: Looks `sys.stderr` up for each line, since a notebook or a test replaces it.
_stderr = logging._StderrHandler()  # type: ignore[attr-defined]
_stderr.setFormatter(logging.Formatter("%(name)s: %(message)s"))
_stderr.addFilter(lambda _: [*logger.handlers, *logging.getLogger().handlers] == [_stderr])
