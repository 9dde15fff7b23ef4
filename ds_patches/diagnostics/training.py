"""The training that `doctor` diagnoses: a configuration, and logs."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.version import Version

from ds_patches.core.errors import FlagError
from ds_patches.diagnostics import configuration, log, messages
from ds_patches.diagnostics.configuration import Configuration

#: Matches a path, and no line of a log.
_PATH = re.compile(r"\S*/\S*|\S+\.[A-Za-z]\w{1,4}")
#: What Lightning's strategy for DeepSpeed logs, and its module in tracebacks.
_LIGHTNING = re.compile(
    r"initializing deepspeed distributed: GLOBAL_RANK|lightning[\w/.]{0,20}strategies[/.]deepspeed"
)
USAGE = (
    'ds-patches doctor [FILE ...], or one quoted line of a log: ds-patches doctor "size mismatch"'
)


@dataclass
class Training:
    """The inputs of one diagnosis. names: of the files. is_lightning: a log is of Lightning."""

    names: list[str] = field(default_factory=list)
    config: Configuration = field(default_factory=Configuration)
    is_configured: bool = False
    logs: list[log.Log] = field(default_factory=list)
    is_lightning: bool = False

    def add(self, name: str, text: str) -> None:
        """Add a file: a configuration or a log, by its content."""
        self.names.append(name)
        if configuration.is_configuration(name, text):
            if self.is_configured:
                raise FlagError(f"{name} is a second configuration: run doctor once for each")
            self.config, self.is_configured = configuration.read(name, text), True
        else:
            self.logs.append(log.read(text))
            self.is_lightning |= bool(_LIGHTNING.search(text))

    def use_printed_settings(self) -> None:
        """Use the settings that a log prints, if there is no configuration file."""
        printed = [log.config for log in self.logs if log.config]
        if printed and not self.is_configured:
            with suppress(FlagError):  # a part of a configuration, or of another release
                is_partial = {*printed[-1]}.isdisjoint(configuration.BATCHES)
                self.config = configuration.from_settings("log", printed[-1], is_partial=is_partial)
                self.is_configured = True
        if self.is_lightning:
            self.config = replace(self.config, facts={**self.config.facts, "lightning": True})

    @property
    def is_foreign(self) -> bool:
        """True if the logs have neither an error nor a line of DeepSpeed."""
        return not any(log.has_error or log.names_deepspeed for log in self.logs)

    @property
    def own_messages(self) -> list[str]:
        """The messages of ds_patches in the logs."""
        return [line for log in self.logs for line in log.own_messages]

    @property
    def releases(self) -> list[Version]:
        """The releases of DeepSpeed in the logs, oldest first."""
        return sorted({version for log in self.logs for version in log.releases})


def read(words: Sequence[str], config: Path | None = None) -> Training:
    """Read the arguments of `doctor`: files, "-" for the standard input, or one line of a log."""
    case = Training()
    for word in [*([str(config)] if config else []), *words]:
        is_file = word == "-" or _PATH.fullmatch(word) or os.path.lexists(word)
        text = configuration.text_of(word) if is_file else word
        if not any(map(str.isalpha, text)):
            raise FlagError(f"there is no word in {word!r}; {USAGE}")
        if is_file:
            case.add("the standard input" if word == "-" else word, text)
        elif len(words) > 1 or config or not (word.split()[1:] or _is_known(word)):
            raise FlagError(f"{word!r}: no file of that name; {USAGE}")
        else:
            case.logs.append(log.read(word))
    case.use_printed_settings()
    return case


def _is_known(word: str) -> bool:
    """Return True if a word without white space is the message of a defect."""
    return any(True for error in log.read(word).errors for _ in messages.match(error))
