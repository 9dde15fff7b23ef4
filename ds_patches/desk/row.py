"""What a symptom is: a script that some releases of DeepSpeed get wrong, and what helps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packaging.version import Version


@dataclass(frozen=True)
class Symptom:
    """A script, what it comes to on stock DeepSpeed, and where.

    script, outcome: Markdown; a message of DeepSpeed's or PyTorch's stands in backticks.
    stages: the ZeRO stages.
    first, right: the first release that is wrong, and the first that is right again; None if no
        release is.
    patch: the one that cures it, or nothing.
    add: what the script needs besides `ds_patches.apply_all()`; without a patch, instead of it.
    anchor: of its section in docs/troubleshooting.md.
    needs: what brings it about: settings, by their names in desk/configuration.py, and
        "script" where the script has to do something besides.
    asked: what else leads `explain` there: in backticks a message, with "..." for what differs;
        or the words of a question, in any order, or how they begin.
    shown: for a message that others raise, too: what a traceback of this one holds, as a regular
        expression. After a "!" nothing is said where that is not seen, as the message is anybody's;
        after a "?" neither, and even then it may be another's.
    proof: the name under which `prove` trains the script on this machine, at the last of `stages`.
    numbers: of upstream's pull requests or issues that made it right.
    """

    script: str
    outcome: str
    stages: tuple[int, ...]
    first: str
    right: str | None
    patch: str
    add: str = ""
    anchor: str = ""
    needs: str = "script"
    asked: tuple[str, ...] = ()
    shown: str = ""
    proof: str = ""
    numbers: str = ""

    @property
    def cures(self) -> str:
        """What helps, in any release."""
        return f"{self.patch} {self.add}"

    def as_json(self) -> dict[str, Any]:
        found = {"patch": self.patch, "row": plain(self.script), "outcome": plain(self.outcome)}
        where = {"stages": self.stages, "first": self.first, "right": self.right}
        return {**found, **where, "anchor": self.anchor}

    def is_wrong(self, version: Version) -> bool:
        ended = self.right and version >= Version(self.right)
        return version >= Version(self.first) and not ended


def plain(markdown: str) -> str:
    """Return the text of a cell without marks, on one line."""
    return " ".join(markdown.replace("`", "").split())
