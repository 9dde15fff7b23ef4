"""How a case that went wrong on the ranks looks in pytest."""

from __future__ import annotations


class WorldError(Exception):
    """The ranks did not all return; the message holds what each of them had to say."""


class WorldTimeout(WorldError):
    """No rank failed, but not all returned before the deadline."""


class RankError(WorldError):
    """A rank raised or died. `rank` failed first, `text` is its traceback or its exit code."""

    def __init__(self, rank: int, text: str, others: str = "") -> None:
        self.rank = rank
        self.text = text
        super().__init__("\n".join(filter(None, [f"rank {rank} failed: {text}", others])))
