"""Messages that the package logs while a block runs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def listening(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Yield the messages of this level and above, as they come."""
    heard: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ds_patches")
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)
