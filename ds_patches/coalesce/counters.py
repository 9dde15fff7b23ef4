"""Numbers that several ranks add to, each addition seen by all in one order.

In the process group's store, which every rank reaches, at some 0.3 ms a word; or, where all ranks
are on one host, in a file in memory, at some microseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ds_patches.core.errors import Refused

_MEMORY = Path("/dev/shm")
_WORD = 8  # bytes


class StoreCounters:
    """So many numbers, all 0 to begin with, under names that begin with `key`."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key

    def add(self, index: int, word: int) -> int:
        """Return the sum with `word`."""
        return int(self._store.add(f"{self._key}/{index}", word))

    def clear(self, index: int) -> None:
        """Set to 0; nobody may look at it meanwhile."""
        self._store.set(f"{self._key}/{index}", "0")  # the only word that waits for no answer


class FileCounters:
    """The same in one file that all processes of a host map, under its lock."""

    def __init__(self, store: Any, key: str, count: int, openers: int) -> None:
        """`store`: where the first to come leaves the file's name for the other `openers`.

        Raises Refused where that file cannot be found: the ranks are on several hosts, or in
        containers that share no memory.
        """
        self._opened = ExitStack()
        folder = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
        mine, path = tempfile.mkstemp(prefix="ds_patches-", dir=folder)
        self._file = self._keep(mine)
        try:
            os.truncate(mine, (count + 1) * _WORD)
            chosen = store.compare_set(key, "", f"{_identity(mine)} {path}").decode()
        except BaseException:
            os.unlink(path)
            raise
        identity, _, name = chosen.partition(" ")
        if name != path:
            os.unlink(path)
            self._file = self._keep(_opened(name, identity))
        mapped = self._opened.enter_context(mmap.mmap(self._file, 0))
        self._words = self._opened.enter_context(memoryview(mapped).cast("q"))
        if self.add(count, 1) == openers:
            os.unlink(name)  # nobody needs its name any more

    def _keep(self, file: int) -> int:
        self._opened.callback(os.close, file)
        return file

    def add(self, index: int, word: int) -> int:
        if not word:  # who waits asks often, and keeps nobody from saying theirs
            return int(self._words[index])
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            total = self._words[index] = int(self._words[index]) + word
            return total
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def clear(self, index: int) -> None:
        self._words[index] = 0

    def __del__(self) -> None:
        self._opened.close()


def are_on_one_host(environment: Mapping[str, str]) -> bool:
    """What the launcher says; the same on all ranks. torchrun and deepspeed say it."""
    local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE")
    return local is not None and local == environment.get("WORLD_SIZE")


def _identity(file: int) -> str:
    found = os.fstat(file)
    return f"{found.st_dev}:{found.st_ino}"


def _opened(path: str, identity: str) -> int:
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR)
        if _identity(file) == identity:
            return file
        os.close(file)
    raise Refused(
        f"coalesce_grad_reduction(): {path}, which another rank made, is not there on this one, "
        "though the launcher says that all ranks are on one host. Set LOCAL_WORLD_SIZE to how many "
        "share their memory"
    )
