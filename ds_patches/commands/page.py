"""docs/troubleshooting.md, read: its sections, and where their messages stand in a text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

_HERE = Path(__file__).parents[1]

_HEADING = re.compile(r"^#{2,4} (.+?)(?: \{ ?#([\w-]+) ?\})?$", re.MULTILINE)
_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
#: Between two words of a rank's output may stand its name.
_GAP = r"\s+(?:\[rank\d+\]:\s*)?"
#: What differs from case to case: a placeholder, a shape, a number that is not 0, an ellipsis.
_PIECE = re.compile(r"<\w+>|\.\.\.|\[[\d, ]*\d\]|\b[1-9]\d*\b|\s+")
_ENDS = re.compile(r"^(\s|<\w+>|\.\.\.)+|(\s|<\w+>|\.\.\.)+$")
#: Letters. A shorter message of ours could stand in any log.
_SHORT = 25
_WORD = re.compile(r"[a-z_]{3,}")
_IDLE = re.compile("(and|are|but|can|does|error|for|from|has|have|how|not|that|the|what|when)$")


@dataclass(frozen=True)
class Section:
    """One answer. anchor: nothing where the page gives none; ours: whether ds_patches says it."""

    title: str
    anchor: str
    body: str
    ours: bool

    @cached_property
    def messages(self) -> tuple[str, ...]:
        """What is printed where it applies: code that reads like a sentence."""
        body = codes(re.sub(r"```.*?```", "", self.body, flags=re.DOTALL))
        return (*filter(re.compile(r"\S\s").search, codes(self.title)), *filter(_is_told, body))


def path() -> Path:
    """Return where the page lies: in a wheel in the package, in a checkout where it is written."""
    places = (_HERE / "troubleshooting.md", _HERE.parent / "docs/troubleshooting.md")
    return next((place for place in places if place.exists()), places[0])


@cache
def sections() -> tuple[Section, ...]:
    """Return all sections with a text of their own."""
    text = path().read_text(encoding="utf-8")
    ours = text.index("\n## Messages of ds_patches\n")
    ends = [*_HEADING.finditer(text)]
    bodies = (text[a.end() : b.start()].strip() for a, b in pairwise(ends))
    found = (
        Section(head[1], head[2] or "", body, head.start() > ours)
        for head, body in zip(ends, [*bodies, text[ends[-1].end() :].strip()], strict=True)
    )
    return tuple(section for section in found if section.body)


def codes(markdown: str) -> list[str]:
    """Return what stands in backticks, each on one line."""
    return [" ".join(code.split()) for _, code in _CODE.findall(markdown)]


def words(text: str) -> frozenset[str]:
    """Return what a text is about; "spikes", "spiked" and "spiking" are one."""
    told = (word for word in _WORD.findall(text.lower()) if not _IDLE.match(word))
    return frozenset(re.sub(r"(ing|ed|es|s|e)$", "", word) for word in told)


@cache
def pattern(message: str) -> tuple[re.Pattern[str], int]:
    """Return what finds a message in a text, and how many letters have to be the same."""
    message = _ENDS.sub("", message)
    fixed = _PIECE.split(message)
    parts = [re.escape(fixed[0])]
    for piece, text in zip(_PIECE.findall(message), fixed[1:], strict=True):
        parts += [_any(piece), re.escape(text)]
    return re.compile("".join(parts)), sum(map(len, fixed))


def hits(text: str, messages: Iterable[tuple[Section, str]]) -> Iterator[tuple[Section, str]]:
    """Yield the messages that stand in a text, with what stands there; the longest first.

    Of several at one place it is the longest.
    """
    found = []
    for section, message in messages:
        regex, weight = pattern(message)
        found += [(weight, hit, section) for hit in regex.finditer(text)]
    taken: list[re.Match[str]] = []
    for weight, hit, section in sorted(found, key=lambda one: -one[0]):
        if any(hit.end() > one.start() and one.end() > hit.start() for one in taken):
            continue
        if _is_meant(text, hit, section.ours and weight < _SHORT):
            taken.append(hit)
            yield section, hit[0]


def _is_meant(text: str, hit: re.Match[str], short: bool) -> bool:
    """Whether it is of DeepSpeed or of ds_patches, as far as a log tells."""
    line = text[text.rfind("\n", 0, hit.start()) + 1 : hit.end()]
    if short and "\n" in text:
        return "ds_patches" in line.lower()
    if re.search("(IndexError|TypeError): ", line):
        frames = re.findall('File "([^"]+)"', text[max(0, hit.start() - 4000) : hit.start()])
        callers = [one for one in frames if "/torch/" not in one]  # who has called PyTorch
        return not callers or any(word in callers[-1] for word in ("deepspeed", "ds_patches"))
    return True


def _any(piece: str) -> str:
    if piece.isspace():
        return _GAP
    return {"[": r"\[[\d, ]*\]", "<": r".{1,400}?", ".": r".{0,400}?"}.get(piece[0], r"\d+")


def _is_told(code: str) -> bool:
    """Whether it is a sentence that something prints, and no line to write."""
    told = len(re.findall(r"(?<![\w.(])[A-Za-z']{2,}(?![\w.(])", code)) > 3
    return told and not re.match(r"(ds-patches|python|make|with|import|engine|DS_PATCHES)\b", code)
