"""The table of defects, defects.json: what releases of DeepSpeed get wrong, and what helps.

Besides the rows, the file has under "settings", by name, keys of the configuration, each with "="
and a pattern of its values; under "default_texts", the evidence for a setting that is on by
default; under "script_actions", conditions that no configuration shows; under "keys", the keys that
DeepSpeed knows. Rows with a section come first: defects of ordinary scripts. Then come notes, which
are no defects and have no stages, then each further fix that a release after 0.16.0 brought, oldest
first. A defect has one row for each span of releases.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from ds_patches.core import files

#: The newest release that was examined. "No release is right" means none up to this one.
TESTED = "0.19.8"
OLDEST = "0.16.0"
#: The kinds of harm, worst first, with their titles in reports.
HARMS = {
    "wrong": "wrong weights",
    "crash": "a crash or a hang",
    "cost": "time, memory, or a changed default",
}


@dataclass(frozen=True)
class Defect:
    """A defect of stock DeepSpeed: what a script does, the outcome, and where it occurs.

    script, outcome: Markdown, with messages of DeepSpeed and PyTorch in backticks. The default of
        `script` is the names in `needs`.
    stages: the ZeRO stages; by default all. A note has none.
    first, right: the first release with the defect, "0" if 0.16.0 has it, and the first one
        without it, "" if there is none.
    needs: the conditions: names of settings and script actions, and "script" if the script has to
        do something else; "zero3" in a note.
    harm: a key of HARMS.
    numbers: upstream's pull requests or issues that fixed it; "" if none is known.
    patch: the patch that fixes it. do: what the user does besides the patch, or without one.
    section: the anchor of its section in docs/troubleshooting.md.
    proof: the name with which `prove` trains the script, at the last of `stages`. unproved: why
        there is no proof of what a patch fixes.
    messages: messages raised besides those in `outcome`, and words of posts that have no error;
        "..." matches any text. Short words need `shown`.
    shown: regular expressions with "|" between them, one of which matches the traceback, if other
        defects raise the same message. With "!" before them, a message without a match is not this
        defect's; with "?" neither, and a match only may be, as one of an expression after "|?".
    """

    script: str
    outcome: str
    stages: tuple[int, ...]
    first: str = "0"
    right: str = ""
    needs: str = ""
    harm: str = "wrong"
    numbers: str = ""
    patch: str = ""
    do: str = ""
    section: str = ""
    proof: str = ""
    unproved: str = ""
    messages: tuple[str, ...] = ()
    shown: str = ""

    @property
    def anchor(self) -> str:
        """Anchor of the section, or of the row in docs/symptoms.md ("fix-", numbers or words)."""
        words = self.numbers.split() or re.findall(r"\w+", self.outcome.lower())[:6]
        return self.section or f"fix-{'-'.join(words)}"

    @property
    def raised(self) -> tuple[str, ...]:
        """All messages of the defect; for a row without a section, only `messages`.

        A single word of the outcome is the name of a setting, which programs print, or an error's.
        """
        quoted = re.findall("`(.+?)`", self.outcome * bool(self.section))
        return (*(q for q in quoted if " " in q or q.endswith("Error")), *self.messages)

    def is_wrong(self, version: Version) -> bool:
        is_fixed = self.right and version >= Version(self.right)
        return version >= Version(self.first) and not is_fixed


def plain(markdown: str) -> str:
    """Return the text of a table cell on one line, without backticks."""
    return " ".join(markdown.replace("`", "").split())


def wrong_in(version: Version | None = None, patch: str = "") -> Iterator[Defect]:
    """Yield the defects of a release, or of all releases, that a patch fixes, or all."""
    for defect in DEFECTS:
        if patch in ("", defect.patch) and (version is None or defect.is_wrong(version)):
            yield defect


def _defect(stages: str = "0123", script: str = "", **row: Any) -> Defect:
    """Return the defect of a row of defects.json."""
    conditions = (name for name in row.get("needs", "").split() if name != "script")
    script = script or ", ".join(
        SCRIPT_ACTIONS.get(name, name.replace("_", " ")) for name in conditions
    )
    messages = tuple(row.pop("messages", ()))
    return Defect(script, stages=tuple(map(int, stages)), messages=messages, **row)


_DATA = json.loads(files.text(Path(__file__).with_suffix(".json")))
SETTINGS: dict[str, list[str]] = _DATA["settings"]
DEFAULT_TEXTS: dict[str, str] = _DATA["default_texts"]
SCRIPT_ACTIONS: dict[str, str] = _DATA["script_actions"]
#: For each section of a configuration, the keys that any release knows.
KEYS = {section: [*" ".join(lines).split()] for section, lines in _DATA["keys"].items()}
#: All rows; those that are defects; of these, those with a section, and those without.
TABLE = tuple(_defect(**row) for row in _DATA["defects"])
DEFECTS = tuple(defect for defect in TABLE if defect.stages)
DOCUMENTED = tuple(defect for defect in DEFECTS if defect.section)
FIXES = tuple(defect for defect in DEFECTS if not defect.section)
