"""One training, as `doctor` is given it: a configuration, and logs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.version import Version

from ds_patches.core.errors import FlagError
from ds_patches.diagnostics import configuration, given, log
from ds_patches.diagnostics.configuration import Configuration

#: Bytes of a log's end that are read.
_LOG = 1 << 28
#: What is a path, and no line of a log.
_PATH = re.compile(r"\S*/\S*|\S+\.[A-Za-z]\w{1,4}")
#: What Lightning's strategy for DeepSpeed logs, and its modules in tracebacks.
_LIGHTNING = re.compile("initializing deepspeed distributed: GLOBAL_RANK|lightning[./_]pytorch")
USAGE = (
    'ds-patches doctor [FILE ...], or one quoted line of a log: ds-patches doctor "size mismatch"'
)


@dataclass
class Training:
    """What is known of one training. names: of its files. is_lightning: a log is Lightning's."""

    names: list[str] = field(default_factory=list)
    config: Configuration = field(default_factory=Configuration)
    is_configured: bool = False
    logs: list[log.Log] = field(default_factory=list)
    is_lightning: bool = False

    def add(self, name: str, content: bytes, folder: Path) -> None:
        """Add a file: a configuration or a log, by its content."""
        text = content.decode(errors="replace")
        self.names.append(name)
        if configuration.is_one(name, text):
            if self.is_configured:
                raise FlagError(f"{name} is a second configuration: ask for each by itself")
            self.config, self.is_configured = configuration.read(name, text, folder), True
        elif any(map(str.isalpha, text)):
            self.logs.append(log.read(text))
            self.is_lightning |= bool(_LIGHTNING.search(text))
        else:
            raise FlagError(f"{name} has no word: neither a configuration nor a log")

    def settle(self) -> None:
        """Take the settings from a log, if no configuration was given."""
        printed = [logged.config for logged in self.logs if logged.config]
        if printed and not self.is_configured:
            with suppress(FlagError):  # a part, or of another release
                self.config, self.is_configured = configuration.of("log", printed[-1]), True
        if self.is_lightning:
            self.config = replace(self.config, facts={**self.config.facts, "lightning": True})

    @property
    def said(self) -> list[str]:
        """What ds_patches says in the logs."""
        return [line for logged in self.logs for line in logged.said]

    @property
    def releases(self) -> list[Version]:
        """The releases that the logs name."""
        return sorted({version for logged in self.logs for version in logged.releases})


def read(words: Sequence[str], config: Path | None = None) -> Training:
    """Read what `doctor` is given: files, "-" for the standard input, or one line of a log."""
    case = Training()
    for word in [*([str(config)] if config else []), *words]:
        path = Path(word)
        if word == "-":
            case.add("the standard input", given.piped(sys.stdin.buffer), Path())
        elif _PATH.fullmatch(word) or os.path.lexists(word):
            case.add(word, given.content(path, _LOG, end=True), path.parent)
        elif len(words) > 1 or config:
            raise FlagError(f"{word!r} is no file; {USAGE}")
        elif any(map(str.isalpha, word)):
            case.logs.append(log.read(word))
        else:
            raise FlagError(f"there is no word in {word!r}; {USAGE}")
    case.settle()
    return case
