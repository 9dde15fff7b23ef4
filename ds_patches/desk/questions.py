"""Questions: what the table's words have to do with those of a question.

words.json has what people say. "same": before each word of the table what means the same, regular
expressions of whole words, in which NOT stands for "not"; the first that fits counts: "gradient
checkpointing" is no checkpoint. "common": what says nothing by itself. "elsewhere": with one of
these, a question is of something else, unless the row speaks of it, too.

Whoever asks in the pages' own words asks for that row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from math import log
from pathlib import Path

from ds_patches.core import files
from ds_patches.desk import pasted, sections
from ds_patches.desk.defects import KNOWN, Defect, plain

_DATA = json.loads(files.text(Path(__file__).with_name("words.json")))
_NAMES = [*_DATA["same"]]
_SAME = re.compile(
    "|".join(
        rf"\b(?P<_{at}>{'|'.join(ways).replace('NOT', _DATA['not'])})\b"
        for at, ways in enumerate(_DATA["same"].values())
    )
)
_COMMON, _ELSEWHERE = ({*" ".join(_DATA[kind]).split()} for kind in ("common", "elsewhere"))
_WORD = re.compile(r"[^\W\d]\w+|\d+\.\d+(?:\.\d+)?")
_STAGES = re.compile(
    r"\b(?:zero|stage)(?:[ _-]?stages?)?[ _-]?[0-3](?:[\W_]+(?:and |or )?[0-3](?![.\w]))*\b",
    re.IGNORECASE,
)
#: Letters of a question, and words that no row has, besides a third of all.
_MOST, _STRANGE = 1000, 1
#: What a row has to share with a question that no phrase is made for: words, and a part of all; it
#: is less if one is a name, as pin_memory, and least if few rows have it.
_WORDS, _PART = 3, 0.75
_NAMED_WORDS, _NAMED_PART, _RARE = 2, 0.5, 2
#: Letters of a script or an outcome that is nobody else's.
_OWN = 20
_SILENT = re.compile("^No message(,? (and|or) |: )")
#: What asks for advice, and tells of nothing that went wrong.
_ADVICE = re.compile(
    r"\W*(how (do|to|can|should|could|many|much|long)\b(?! (i |we )?(fix|solve|avoid|stop|prevent))"
    r"|what (is|are|does|do)\b|which\b|where\b|can\b|could\b|should\b|is (it|there|deepspeed)\b)",
    re.IGNORECASE,
)


def are_of(question: str, rows: Iterable[Defect]) -> set[Defect]:
    """Return the rows that a question is about: those with a phrase in it, or most of its words."""
    if _ADVICE.match(question):
        return set()
    said, told = _words(question[:_MOST])
    strange = sum(not _known(word) for word in told)
    if strange > _STRANGE + len(told) / 3:
        return set()
    stages = {int(digit) for said in _STAGES.findall(question) for digit in re.findall(r"\d", said)}
    rows = [one for one in rows if told & _ELSEWHERE <= _bag(one)]
    rows = [one for one in rows if not stages or not one.stages or stages & {*one.stages}]
    asked = {one for one in rows if any(_has(said, phrase) for phrase in _phrases(one))}
    return asked or _closest(told, rows)


def quoted(text: str) -> set[Defect]:
    """Return the rows of which a text is the script, the outcome, both, or the section's title."""
    return _own().get(pasted.alike(text), set()) if len(text) <= _MOST else set()


@cache
def _own() -> dict[str, set[Defect]]:
    """The rows of one section by the words that they have on the pages, as `alike` has them.

    A message alone is no such words: it may be that of other rows, too.
    """
    found: dict[str, set[Defect]] = {}
    titles = sections.titles()
    for one in KNOWN:
        title = titles.get(one.anchor, "")
        both = one.script + one.outcome
        for words in {both, title, _SILENT.sub("", title), one.script, one.outcome}:
            is_worded = re.search(r"\w{4}", re.sub("`.+?`", "", words))
            if is_worded and len(own := pasted.alike(plain(words))) >= _OWN:
                found.setdefault(own, set()).add(one)
    return {own: rows for own, rows in found.items() if len({one.anchor for one in rows}) == 1}


def _closest(told: set[str], rows: list[Defect]) -> set[Defect]:
    weights = {word: log(1 + len(KNOWN) / (1 + _known(word))) for word in told}
    parts = {}
    for one in rows:
        shared = [word for word in told if _stands(word, _bag(one))]
        names = [_known(word) for word in shared if "_" in word.strip("_")]
        words, least = (_NAMED_WORDS, _NAMED_PART) if names else (_WORDS, _PART)
        words -= bool(names) and min(names) <= _RARE and len(told) > 1
        weight = sum(weights[word] for word in shared)
        if len(shared) >= words and weight >= least * sum(weights.values()):
            parts[one] = weight
    return {one for one, part in parts.items() if part == max(parts.values())}


def _words(text: str) -> tuple[set[str], set[str]]:
    """Return the words of a text as the table has them: all, and those that say something."""
    text = _SAME.sub(lambda found: f" {_NAMES[int((found.lastgroup or '')[1:])]} ", text.lower())
    words = _WORD.findall(text)
    return {*map(_stem, words)}, {_stem(word) for word in words if word not in _COMMON}


def _stem(word: str) -> str:
    return word[:-1] if len(word) > 3 and word[-1] == "s" and word[-2] != "s" else word


def _has(said: set[str], phrase: set[str]) -> bool:
    """Whether all words of a phrase, or longer ones, are said."""
    return all(any(one.startswith(word) for one in said) for word in phrase)


def _stands(word: str, words: Iterable[str]) -> bool:
    """Whether one of the words is this one, or one begins like the other: "warmuplr", "warmup"."""
    return any(
        word == one or (min(len(word), len(one)) > 4 and _begin_alike(word, one)) for one in words
    )


def _begin_alike(word: str, other: str) -> bool:
    return word.startswith(other) or other.startswith(word)


@cache
def _phrases(one: Defect) -> list[set[str]]:
    return [_words(phrase)[0] for phrase in one.phrases]


@cache
def _bag(one: Defect) -> frozenset[str]:
    """The words of a row, but for messages that stand for it besides."""
    return frozenset(_words(" ".join((one.script, one.outcome, one.needs, *one.phrases)))[1])


@cache
def _known(word: str) -> int:
    """How many rows have a word."""
    return sum(_stands(word, _bag(one)) for one in KNOWN)
