"""Ending processes that are known by where they are, not by who started them.

torchrun's workers have sessions of their own, and a launcher that is killed leaves its ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

_SECONDS = 10.0


def working_in(folder: Path) -> list[psutil.Process]:
    """Those whose working directory is `folder`, or is below it."""

    def here(process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return Path(process.cwd()).is_relative_to(folder)
        return False

    return list(filter(here, psutil.process_iter()))


def end(find: Callable[[], list[psutil.Process]]) -> None:
    """Kill what `find` finds until it finds nothing: what is killed may just be starting others."""
    deadline = time.monotonic() + _SECONDS
    while left := find():
        assert time.monotonic() < deadline, left
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)
