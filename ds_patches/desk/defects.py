"""What releases of DeepSpeed get wrong in training, and what helps: one table, defects.json.

All else is a view of it: doctor, explain, prove, the site. Besides the rows, its data says under
"settings" where a name stands in the configuration, and after "=" its values, a pattern; under
"doings", what no configuration tells. Rows with a section come first: what ordinary scripts meet.
Then come notes, which are no defects: they have no stages. Then comes each further fix that
releases after 0.16.0 brought, the oldest first. A defect has one row for each span of releases.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from ds_patches.core import files

#: The newest release that was looked at. "No release is right" means none up to this one.
TESTED = "0.19.8"
OLDEST = "0.16.0"


@dataclass(frozen=True)
class Defect:
    """A script, what it comes to on stock DeepSpeed, and where.

    script, outcome: Markdown; a message of DeepSpeed's or PyTorch's stands in backticks. Without
        a script the words of `needs` stand for it.
    stages: the ZeRO stages, a digit each; all if nothing is said.
    first, right: the first release that is wrong, 0.16.0 if older ones are, too; and the first that
        is right again, if any is.
    needs: what brings it about: names of settings and doings, and "script" where the script has to
        do something besides.
    numbers: of upstream's pull requests or issues that made it right; none if it was found by
        comparing two releases.
    patch: the one that cures it. do: what else helps: with a patch besides it, else instead of it.
    section: of docs/troubleshooting.md.
    proof: the name under which `prove` trains the script, at the last of `stages`. unproved: why
        nothing proves what a patch cures.
    asked: what else leads `explain` there: in backticks a message, with "..." for what differs;
        or the words of a question, in any order, or how they begin.
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
    numbers: str = ""
    patch: str = ""
    do: str = ""
    section: str = ""
    proof: str = ""
    unproved: str = ""
    asked: tuple[str, ...] = ()
    shown: str = ""

    @property
    def anchor(self) -> str:
        """Its section, or the name of a fix as links have it: by its number, or first words."""
        words = self.numbers.split() or re.findall(r"\w+", self.outcome.lower())[:6]
        return self.section or f"fix-{'-'.join(words)}"

    @property
    def messages(self) -> list[str]:
        """What it raises. Of a fix only those that tell it from others, which it is asked for."""
        texts = (self.outcome * bool(self.section), *self.asked)
        return re.findall("`(.+?)`", "".join(texts))

    @property
    def phrases(self) -> list[str]:
        """Words of questions."""
        return [one for one in self.asked if one[0] != "`"]

    def as_json(self) -> dict[str, Any]:
        found = {"patch": self.patch, "row": plain(self.script), "outcome": plain(self.outcome)}
        where = {"stages": self.stages, "first": self.first, "right": self.right or None}
        return {**found, **where, "anchor": self.section}

    def is_wrong(self, version: Version) -> bool:
        ended = self.right and version >= Version(self.right)
        return version >= Version(self.first) and not ended


def plain(markdown: str) -> str:
    """Return the text of a cell without marks, on one line."""
    return " ".join(markdown.replace("`", "").split())


def _defect(stages: str = "0123", script: str = "", **row: Any) -> Defect:
    """Return a row of the data, as the class says."""
    named = (name for name in row.get("needs", "").split() if name != "script")
    script = script or ", ".join(DOINGS.get(name, name.replace("_", " ")) for name in named)
    asked = tuple(row.pop("asked", ()))
    return Defect(script, stages=tuple(map(int, stages)), asked=asked, **row)


_DATA = json.loads(files.text(Path(__file__).with_suffix(".json")))
SETTINGS: dict[str, list[str]] = _DATA["settings"]
DOINGS: dict[str, str] = _DATA["doings"]
#: All that `explain` knows; what some release gets wrong; of that what has a section, and the rest.
KNOWN = tuple(_defect(**row) for row in _DATA["defects"])
DEFECTS = tuple(one for one in KNOWN if one.stages)
TOLD = tuple(one for one in DEFECTS if one.section)
FIXES = tuple(one for one in DEFECTS if not one.section)
