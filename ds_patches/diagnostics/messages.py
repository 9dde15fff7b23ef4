"""Finds the defects that raise an error, by its message and its traceback."""

import re
from collections.abc import Iterator
from functools import cache, lru_cache

from ds_patches.diagnostics import log
from ds_patches.diagnostics.defects import TABLE, Defect
from ds_patches.diagnostics.log import Error

#: A truncated message has at least this many characters, and this part, of the whole one.
_MIN_SIZE, _MIN_PART = 18, 0.6
#: A message below this length may be raised by any code.
_SHORT = 24
#: Characters of a text in which a truncated message is searched.
_SEARCHED = 1000


def match(error: Error) -> Iterator[tuple[Defect, bool]]:
    """Yield the defects that may raise an error, each with True if the traceback confirms it."""
    text = log.normalized(error.message)
    complete = {message for message in _messages() if _contains(text, message)}
    if confirmed := _confirmed(error, complete):
        yield from confirmed.items()
    else:
        truncated = _truncated_messages(error.message.lstrip())
        yield from ((defect, False) for defect in _confirmed(error, truncated))


def _confirmed(error: Error, messages: set[str]) -> dict[Defect, bool]:
    """Return the defects of messages that the evidence allows, each with True if it is sure."""
    allowed = {}
    for defect, raised in _raised().items():
        if messages & raised:
            mark, pattern = defect.shown[:1], defect.shown.lstrip("?!")
            if mark == "?" and error.is_whole_log:
                continue
            shown = [path for path in pattern.split("|") if _has(error.evidence, path.lstrip("?"))]
            is_shown, is_sure = bool(shown), mark != "?" and any(path[:1] != "?" for path in shown)
            is_short = all(len(message) < _SHORT for message in messages & raised)
            is_excluded = error.has_traceback or (is_short and error.has_frames)
            if is_shown or (mark not in ("?", "!") and not is_excluded):
                allowed[defect] = is_sure
    messages &= set().union(*(_raised()[defect] for defect in allowed))
    # If one message contains another, the longer one counts.
    messages = {m for m in messages if not any(m in longer for longer in messages - {m})}
    return {defect: sure for defect, sure in allowed.items() if messages & _raised()[defect]}


@cache
def _raised() -> dict[Defect, set[str]]:
    """Return the normalized messages of each row."""
    return {defect: {*map(log.normalized, defect.raised)} for defect in TABLE}


@cache
def _messages() -> frozenset[str]:
    return frozenset().union(*_raised().values())


def _has(evidence: str, pattern: str) -> bool:
    """Return True if a pattern matches; `re` would backtrack over each `[\\s\\S]*` in it."""
    start = 0
    for part in pattern.split(r"[\s\S]*"):
        match = re.compile(part, re.MULTILINE).search(evidence, start)
        if not match:
            return False
        start = match.end()
    return True


def _truncated_messages(text: str) -> set[str]:
    """Return the messages that a truncated text begins; an exception's name may precede it."""
    line = log.normalized(text[:_SEARCHED].partition("\n")[0]).rstrip(log.OMITTED)
    return {message for message in _messages() if _ends_in(line, message)}


@lru_cache(1 << 16)
def _ends_in(text: str, message: str) -> bool:
    """Return True if a text ends in a prefix of a message. Cached for the ranks of a log."""
    minimum = max(_MIN_SIZE, round(_MIN_PART * len(message)))
    sizes = range(minimum, len(message) + 1) if log.OMITTED not in message else ()
    return any(text.endswith(message[:size]) for size in sizes)


def _contains(text: str, message: str) -> bool:
    if log.OMITTED not in message:
        return message in text
    return bool(re.search(message.replace(log.OMITTED, ".{1,80}?"), text))
