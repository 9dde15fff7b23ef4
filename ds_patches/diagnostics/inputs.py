"""Reads the files and streams that `doctor` is given, whatever they contain."""

import json
import os
import re
import stat
from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ds_patches.core.errors import FlagError

#: The largest configuration in bytes, and the largest mapping after YAML merges.
MAX_CONFIG, _MAX_KEYS = 1 << 16, 1000
#: Bytes of a chunk of a stream, and how many chunks are read.
_CHUNK, _MAX_CHUNKS = 1 << 25, 16
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*"?)|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\])*"?)|,(?=\s*[}\]])')


def content(file: Path, limit: int, *, end: bool = False) -> bytes:
    """Return the first, or with `end` the last, `limit` bytes of a file or named pipe.

    Raises FlagError if it cannot be read. A pipe without a writer is empty.
    """
    try:
        # O_NONBLOCK: opening a named pipe would wait for a writer.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            status = os.fstat(opened.fileno())
            if stat.S_ISREG(status.st_mode):
                opened.seek(max(0, status.st_size - limit) if end else 0)
            elif not stat.S_ISFIFO(status.st_mode):
                raise FlagError(f"{file} cannot be read: it is neither a file nor a pipe")
            os.set_blocking(opened.fileno(), True)
            return opened.read(limit)
    except OSError as error:
        raise FlagError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:  # an invalid file name
        raise FlagError(f"{str(file)!r} cannot be read: {error}") from error


def end_of_stream(stream: BinaryIO) -> bytes:
    """Return the end of a stream, which may be endless: reading stops after 512 MiB."""
    chunks = islice(iter(partial(stream.read, _CHUNK), b""), _MAX_CHUNKS)
    return b"".join(deque(chunks, maxlen=2))


def settings(name: str, text: str, warnings: list[str]) -> Mapping[str, Any]:
    """Read JSON, or else YAML, whatever the file is called; collect warnings."""
    if "\ufffd" in text:
        raise FlagError(f"{name} cannot be read: it is not text")
    if len(text) > MAX_CONFIG:
        raise FlagError(
            f"{name} has more than {MAX_CONFIG} bytes, which no DeepSpeed configuration has"
        )

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        duplicates = dict.fromkeys(key for key in keys if keys.count(key) > 1)
        warnings.extend(f"{key!r} is there twice: DeepSpeed refuses that" for key in duplicates)
        return dict(pairs)

    # DeepSpeed also accepts comments and trailing commas.
    plain = _TRAILING_COMMA.sub(r"\1", _COMMENT.sub(r"\1", text))
    try:
        config = json.loads(plain, object_pairs_hook=unique)
    except ValueError as error:
        config = _yaml(name, text, error)
    except RecursionError as error:
        raise FlagError(f"{name} is nested too deeply") from error
    if not isinstance(config, Mapping):
        raise FlagError(f"{name} has no DeepSpeed configuration")
    return config


def _yaml(name: str, text: str, json_error: ValueError) -> Any:
    try:
        import yaml
    except ImportError as error:
        message = f"{name} is no JSON ({json_error}); to read YAML: pip install pyyaml"
        raise FlagError(message) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            """Limit merged mappings: each may be an alias, merged again, and grow exponentially."""
            super().flatten_mapping(node)
            if len(node.value) > _MAX_KEYS:
                raise ValueError(f"a mapping of more than {_MAX_KEYS} keys")

    try:
        return yaml.load(text, Loader)
    except Exception as error:  # PyYAML raises its own exceptions and Python's
        message = f"{name} is neither JSON ({json_error}) nor YAML ({str(error)[:300]})"
        raise FlagError(message) from error
