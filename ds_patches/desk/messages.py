"""Messages: which rows an error is of, by its words and its traceback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, lru_cache

from ds_patches.desk import pasted
from ds_patches.desk.defects import KNOWN, Defect
from ds_patches.desk.pasted import Error

#: Of a message that was cut: the letters, and the part of all, that are there; letters of an end.
_CUT, _PART, _LETTERS = 18, 0.65, 6
_WHOLE = 1000  # letters of a text that may be such a part


def show(error: Error) -> Iterator[tuple[Defect, bool]]:
    """Yield the rows of an error's message that its traceback allows, and whether it shows them."""
    whole = _said(error.message)
    said = whole or _said_in_part(error.message.lstrip())
    allowed = {}
    for one, messages in _messages().items():
        if said & messages:
            mark, pattern = one.shown[:1], one.shown.lstrip("?!")
            shown = any(_has(error.evidence, way) for way in pattern.split("|"))
            if shown or (mark not in ("?", "!") and not error.has_traceback):
                allowed[one] = bool(whole) and shown and mark != "?"
    said &= set().union(*(_messages()[one] for one in allowed))
    # Of two messages, one in the other, the longer counts.
    said = {one for one in said if not any(one in other for other in said - {one})}
    yield from ((one, shown) for one, shown in allowed.items() if said & _messages()[one])


@cache
def _messages() -> dict[Defect, set[str]]:
    """Return the messages of all that is known, each as `alike` has it."""
    return {one: {*map(pasted.alike, one.messages)} for one in KNOWN}


def _has(evidence: str, pattern: str) -> bool:
    """Whether one part of a pattern stands behind the other; each is looked for once."""
    at = 0
    for part in pattern.split(r"[\s\S]*"):
        found = re.compile(part).search(evidence, at)
        if not found:
            return False
        at = found.end()
    return True


def _said(text: str) -> set[str]:
    """Return the messages that stand in a text."""
    text = pasted.alike(text)
    return {one for one in set().union(*_messages().values()) if _stands_in(text, one)}


@lru_cache
def _said_in_part(text: str) -> set[str]:
    """Return the messages of which a text has one part: it was cut at an end, or in the middle.

    The text may begin with an exception's name, and further lines may follow.
    """
    text = text[:_WHOLE]
    line = text.partition("\n")[0]
    texts = {*map(pasted.alike, (line, line.partition(": ")[2], text))}
    messages = set().union(*_messages().values())
    return {one for one in messages if any(_is_cut(cut, one) for cut in texts)}


def _is_cut(text: str, message: str) -> bool:
    least = max(_CUT, round(_PART * len(message)))
    if len(text) < least or pasted.CUT in message:
        return False
    parts, sizes = text.split(pasted.CUT), range(len(message), _LETTERS, -1)
    heads = [next((n for n in sizes if part.endswith(message[:n])), 0) for part in parts]
    tails = [next((n for n in sizes if part.startswith(message[-n:])), 0) for part in parts]
    around = [head and tail and head + tail for head, tail in zip(heads, tails[1:], strict=False)]
    return any(least <= size <= len(message) for size in (*heads, *tails, *around))


def _stands_in(text: str, message: str) -> bool:
    if pasted.CUT not in message:
        return message in text
    return bool(re.search(message.replace(pasted.CUT, ".{1,80}?"), text))
