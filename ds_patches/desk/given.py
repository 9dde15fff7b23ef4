"""Files that a command is given, which may be anything."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ds_patches.core.errors import FlagError


def content(file: Path, most: int, *, end: bool = False) -> bytes:
    """Return what a file or a pipe has, but no more bytes than this: the first, or the last.

    Raises FlagError for what cannot be read. A pipe that nobody writes to is empty.
    """
    try:
        # Without waiting for whom a pipe is opened by.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            status = os.fstat(opened.fileno())
            if stat.S_ISREG(status.st_mode):
                opened.seek(max(0, status.st_size - most) if end else 0)
            elif not stat.S_ISFIFO(status.st_mode):
                raise FlagError(f"{file} cannot be read: it is no file")
            os.set_blocking(opened.fileno(), True)
            return opened.read(most)
    except OSError as error:
        raise FlagError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a name that no file can have
        raise FlagError(f"{str(file)!r} cannot be read: {error}") from error
