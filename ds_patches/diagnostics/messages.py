"""Messages: which rows an error is of, by its words and its traceback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, lru_cache

from ds_patches.diagnostics import log
from ds_patches.diagnostics.defects import KNOWN, Defect
from ds_patches.diagnostics.log import Error

#: Of a message that was cut: the letters, and the part of all, that are there.
_CUT, _PART = 18, 0.6
#: Letters of a message that anybody's code may raise.
_SHORT = 24
_WHOLE = 1000  # letters of a text that may be such a part


def show(error: Error) -> Iterator[tuple[Defect, bool]]:
    """Yield the rows of an error's message that its traceback allows, and whether it shows them."""
    text = log.alike(error.message)
    whole = {message for message in _messages() if _stands_in(text, message)}
    messages = whole or _messages_cut(error.message.lstrip())
    allowed = {}
    for defect, raised in _raised().items():
        if messages & raised:
            mark, pattern = defect.shown[:1], defect.shown.lstrip("?!")
            is_shown = any(_has(error.evidence, way) for way in pattern.split("|"))
            is_short = all(len(message) < _SHORT for message in messages & raised)
            is_hidden = error.has_traceback or (is_short and error.has_frames)
            if is_shown or (mark not in ("?", "!") and not is_hidden):
                allowed[defect] = bool(whole) and is_shown and mark != "?"
    messages &= set().union(*(_raised()[defect] for defect in allowed))
    # Of two messages, one in the other, the longer counts.
    messages = {m for m in messages if not any(m in other for other in messages - {m})}
    yield from ((defect, sure) for defect, sure in allowed.items() if messages & _raised()[defect])


@cache
def _raised() -> dict[Defect, set[str]]:
    """Return the messages of each row, as `log.alike` has them."""
    return {defect: {*map(log.alike, defect.raised)} for defect in KNOWN}


@cache
def _messages() -> frozenset[str]:
    return frozenset().union(*_raised().values())


def _has(evidence: str, pattern: str) -> bool:
    """Return True if one part of a pattern stands behind the other; each is looked for once."""
    start = 0
    for part in pattern.split(r"[\s\S]*"):
        found = re.compile(part, re.MULTILINE).search(evidence, start)
        if not found:
            return False
        start = found.end()
    return True


def _messages_cut(text: str) -> set[str]:
    """Return the messages of which a text is the first part; it may begin with an error's name."""
    line = text[:_WHOLE].partition("\n")[0]
    begins = {log.alike(part).rstrip(log.CUT) for part in (line, line.partition(": ")[2])}
    return set().union(*map(_messages_begun, begins))


@lru_cache
def _messages_begun(begin: str) -> frozenset[str]:
    """Return the messages of which `begin` ends in the first part; each rank of a log asks."""
    begun = set()
    for message in _messages():
        least = max(_CUT, round(_PART * len(message)))  # a long one may follow something else
        sizes = range(least, len(message) + 1) if log.CUT not in message else ()
        if any(begin.endswith(message[:size]) for size in sizes):
            begun.add(message)
    return frozenset(begun)


def _stands_in(text: str, message: str) -> bool:
    if log.CUT not in message:
        return message in text
    return bool(re.search(message.replace(log.CUT, ".{1,80}?"), text))
