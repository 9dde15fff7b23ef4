"""How loud the package is, in a program that has not set up logging."""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error", "critical")


def say(level: str | None = None) -> None:
    """Speak, on stderr until the program sets up logging: from `level` on.

    Without a level it is what the logger has, or else info: what is live is said once per engine.
    """
    logger = logging.getLogger("ds_patches")
    if level is not None or logger.level == logging.NOTSET:
        logger.setLevel((level or "info").upper())
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Speaks while nobody else does; Python's own last resort shows warnings only."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        others = [*logging.getLogger("ds_patches").handlers, *logging.getLogger().handlers]
        if others == [self]:
            self.stream = sys.stderr  # of now: a notebook or a test puts another in its place
            super().emit(record)
