"""The lines of docs/launchers.md: what is tested is what is written there."""

from __future__ import annotations

import re

from tests.shell import REPOSITORY

PAGE = REPOSITORY / "docs" / "launchers.md"


def line(words: str) -> str:
    """The one line in the page's shell blocks with these words in it."""
    found = [line for block in _blocks("bash") for line in block.splitlines() if words in line]
    assert len(found) == 1, f"{words!r} is in {len(found)} lines of {PAGE}"
    return found[0].partition("  # ")[0]


def block(language: str, words: str) -> str:
    """The one code block in `language` with these words in it."""
    found = [block for block in _blocks(language) if words in block]
    assert len(found) == 1, f"{words!r} is in {len(found)} blocks of {PAGE}"
    return found[0]


def _blocks(language: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
