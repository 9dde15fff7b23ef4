"""How loud the package is, in a program that has not set up logging."""

from __future__ import annotations

import logging

LEVELS = ("debug", "info", "warning", "error", "critical")


def say(level: str) -> None:
    """Let everything from `level` on be said, on stderr until the program sets up logging."""
    logger = logging.getLogger("ds_patches")
    logger.setLevel(level.upper())
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Speaks while nobody else does; Python's own last resort shows warnings only."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)
