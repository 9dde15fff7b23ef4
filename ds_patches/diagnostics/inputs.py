"""Reads the files and streams that `doctor` is given, whatever they contain."""

import json
import os
import re
from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any

from ds_patches.core.errors import FlagError

#: The largest configuration in bytes.
MAX_CONFIG = 1 << 16
#: Bytes of a chunk of a file, of which the last two are kept, and how many chunks are read.
_CHUNK, _MAX_CHUNKS = 1 << 27, 4
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*"?)|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\])*"?)|,(?=\s*[}\]])')


def text(file: str) -> str:
    """Return the end of a file, or of the standard input for "-"; raises FlagError.

    A stream may be endless: reading stops after 512 MiB.
    """
    try:
        with open(0 if file == "-" else file, "rb", closefd=file != "-") as opened:
            if opened.seekable():
                opened.seek(max(0, opened.seek(0, os.SEEK_END) - 2 * _CHUNK))
            chunks = islice(iter(partial(opened.read, _CHUNK), b""), _MAX_CHUNKS)
            return b"".join(deque(chunks, maxlen=2)).decode(errors="replace")
    except OSError as error:
        raise FlagError(f"{file} cannot be read: {error.strerror}") from error


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
    except (ValueError, RecursionError) as error:
        config = _yaml(name, text, error)
    if not isinstance(config, Mapping):
        raise FlagError(f"{name} has no DeepSpeed configuration")
    return config


def _yaml(name: str, text: str, json_error: Exception) -> Any:
    try:
        import yaml
    except ImportError as error:
        message = f"{name} is no JSON ({json_error}); to read YAML: pip install pyyaml"
        raise FlagError(message) from error
    try:
        return yaml.safe_load(text)
    except Exception as error:  # PyYAML raises its own exceptions and Python's
        message = f"{name} is neither JSON ({json_error}) nor YAML ({str(error)[:300]})"
        raise FlagError(message) from error
