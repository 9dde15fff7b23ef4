"""Which of the older releases have their turn: all of them run, some at every commit."""

from __future__ import annotations

from datetime import date
from importlib.metadata import version as version_of
from typing import NamedTuple

from tests.releases import columns, record


class Turn(NamedTuple):
    """One of several turns, and who says that it is this one's."""

    number: int
    of: int
    why: str

    def __str__(self) -> str:
        return f"turn {self.number} of 0 to {self.of - 1} ({self.why})"


def this(of: int) -> Turn:
    """The turn that it is: by the commits so far, or by the day.

    A clone without its history has too few commits to count.
    """
    if columns.git("rev-parse", "--is-shallow-repository") == "false":
        commits = int(columns.git("rev-list", "--count", "HEAD") or 0)
        return Turn(commits % of, of, f"{commits} commits")
    today = date.today()
    return Turn(today.toordinal() % of, of, f"{today}, as there is no history to count")


def releases(turn: Turn) -> list[str]:
    """Every `of`-th that docs/compatibility.json knows, newest first, but the installed one.

    So each turn has some of every era.
    """
    installed = version_of("deepspeed")
    older = [release for release in reversed(record.load().releases) if release != installed]
    return older[turn.number :: turn.of]
