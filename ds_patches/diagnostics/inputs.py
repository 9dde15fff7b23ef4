"""Files that a command is given, which may be anything."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ds_patches.core.errors import FlagError

#: Bytes of a configuration, and keys of a mapping that others are merged into.
LONGEST, _KEYS = 1 << 16, 1000
#: Bytes of a piece of a stream, and how many pieces are read.
_PIECE, _PIECES = 1 << 25, 16
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*"?)|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*"?)|,(?=\s*[}\]])')


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


def piped(stream: BinaryIO) -> bytes:
    """Return the end of what a stream has, which need not have one: /dev/zero."""
    end = b""
    for _ in range(_PIECES):
        if not (more := stream.read(_PIECE)):
            break
        end = end[-_PIECE:] + more
    return end


def settings(name: str, text: str, warnings: list[str]) -> Mapping[str, Any]:
    """Read JSON, or else YAML, whatever the file is called; collect warnings."""
    if "\ufffd" in text:
        raise FlagError(f"{name} cannot be read: it is no text")
    if len(text) > LONGEST:
        raise FlagError(f"{name} has more than {LONGEST} bytes: no DeepSpeed configuration")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = dict.fromkeys(key for key in keys if keys.count(key) > 1)
        warnings.extend(f"{key!r} is there twice: DeepSpeed refuses that" for key in twice)
        return dict(pairs)

    # Comments and last commas, which DeepSpeed reads, too.
    plain = _LAST_COMMA.sub(r"\1", _COMMENT.sub(r"\1", text))
    try:
        config = json.loads(plain, object_pairs_hook=unique)
    except ValueError as error:
        config = _yaml(name, text, error)
    except RecursionError as error:
        raise FlagError(f"{name} is nested too deeply") from error
    if not isinstance(config, Mapping):
        raise FlagError(f"{name} has no DeepSpeed configuration")
    return config


def _yaml(name: str, text: str, no_json: ValueError) -> Any:
    try:
        import yaml
    except ImportError as error:
        why = f"{name} is no JSON ({no_json}), and to read YAML: pip install pyyaml"
        raise FlagError(why) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            """Merge mappings into one, which may be named, and merged again, and grow so."""
            super().flatten_mapping(node)
            if len(node.value) > _KEYS:
                raise ValueError(f"a mapping of more than {_KEYS} keys")

    try:
        return yaml.load(text, Loader)
    except Exception as error:  # PyYAML raises some of its own, and Python's
        why = f"{name} is neither JSON ({no_json}) nor YAML ({str(error)[:300]})"
        raise FlagError(why) from error
