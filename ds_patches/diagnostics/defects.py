"""The table of defects, defects.json: what releases of DeepSpeed get wrong, and what helps.

Besides the rows, the data has under "settings" where a name stands in the configuration, and after
"=" its values, a pattern; under "said", how to say that a setting is on by default; under "doings",
what no configuration shows; under "keys", the keys that DeepSpeed knows. Rows with a section come
first: what ordinary scripts meet. Then come notes, which are no defects: they have no stages. Then
comes each further fix that releases after 0.16.0 brought, the oldest first. A defect has one row
for each span of releases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from ds_patches.core import files

#: The newest release that was looked at. "No release is right" means none up to this one.
TESTED = "0.19.8"
OLDEST = "0.16.0"
#: What a defect does, the worst first, and its title.
HARMS = {
    "wrong": "wrong weights",
    "crash": "a crash or a hang",
    "cost": "time, memory, or a changed default",
}


@dataclass(frozen=True)
class Defect:
    """A script, what it comes to on stock DeepSpeed, and where.

    script, outcome: Markdown; a message of DeepSpeed's or PyTorch's stands in backticks. Without
        a script the words of `needs` stand for it.
    stages: the ZeRO stages, a digit each; all if nothing is said.
    first, right: the first release that is wrong, 0.16.0 if older ones are, too; and the first that
        is right again, if any is.
    needs: what brings it about: names of settings and doings, and "script" where the script has to
        do something besides; of a note "zero3".
    harm: a key of HARMS.
    numbers: of upstream's pull requests or issues that made it right; none if it was found by
        comparing two releases.
    patch: the one that cures it. do: what else helps: with a patch besides it, else instead of it.
    section: of docs/troubleshooting.md.
    proof: the name under which `prove` trains the script, at the last of `stages`. unproved: why
        nothing proves what a patch cures.
    messages: what it raises besides the messages in `outcome`; "..." stands for what differs.
    shown: for a message that others raise, too: what a traceback of this one holds, as a regular
        expression. After a "!" nothing is said where that is not seen, as the message is anybody's;
        after a "?" neither, and even then it may be another's.
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
        """Its section, or the name of a fix as links have it: by its number, or first words."""
        words = self.numbers.split() or re.findall(r"\w+", self.outcome.lower())[:6]
        return self.section or f"fix-{'-'.join(words)}"

    @property
    def raised(self) -> tuple[str, ...]:
        """Every message that it raises; of a fix, those that tell it from others."""
        return (*re.findall("`(.+?)`", self.outcome * bool(self.section)), *self.messages)

    def is_wrong(self, version: Version) -> bool:
        ended = self.right and version >= Version(self.right)
        return version >= Version(self.first) and not ended


def plain(markdown: str) -> str:
    """Return the text of a cell without marks, on one line."""
    return " ".join(markdown.replace("`", "").split())


def wrong_in(version: Version | None = None, patch: str = "") -> Iterator[Defect]:
    """Yield the defects of a release, or of all; and of those, what a patch cures."""
    for defect in DEFECTS:
        if patch in ("", defect.patch) and (version is None or defect.is_wrong(version)):
            yield defect


def _defect(stages: str = "0123", script: str = "", **row: Any) -> Defect:
    """Return a row of the data, as the class says."""
    named = (name for name in row.get("needs", "").split() if name != "script")
    script = script or ", ".join(DOINGS.get(name, name.replace("_", " ")) for name in named)
    messages = tuple(row.pop("messages", ()))
    return Defect(script, stages=tuple(map(int, stages)), messages=messages, **row)


_DATA = json.loads(files.text(Path(__file__).with_suffix(".json")))
SETTINGS: dict[str, list[str]] = _DATA["settings"]
SAID: dict[str, str] = _DATA["said"]
DOINGS: dict[str, str] = _DATA["doings"]
#: By the section of a configuration, the keys that any release knows.
KEYS = {section: [*" ".join(lines).split()] for section, lines in _DATA["keys"].items()}
#: All rows; what some release gets wrong; of that what has a section, and the rest.
KNOWN = tuple(_defect(**row) for row in _DATA["defects"])
DEFECTS = tuple(defect for defect in KNOWN if defect.stages)
TOLD = tuple(defect for defect in DEFECTS if defect.section)
FIXES = tuple(defect for defect in DEFECTS if not defect.section)
