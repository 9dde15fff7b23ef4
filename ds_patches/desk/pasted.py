"""What people paste: the errors that a log ends in, or a question.

Of a log the last error of each rank counts, with those that led to it: others were survived.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from packaging.version import InvalidVersion, Version

#: Anywhere in a log, as DeepSpeed prints its configuration; and how evidence says so.
_COMPILED = re.compile('deepcompile=True|"deepcompile": true|deepspeed/compile/')
_IS_COMPILED = "DeepCompile is on"
#: Letters of a log's end that are looked through: what came before was survived.
_END = 1 << 22
_ERROR = re.compile(
    r"""(?<![a-zA-Z0-9_.])(?:\w+\.)*(?!ChildFailed|CalledProcess)
        (?:[A-Z]\w*(?:Error|Exception|Interrupt)|(?<=ds_patches[.]core[.]errors[.])\w+)
        (?:[:\uff1a]|[\s`*]*$)
    |Watchdog[ ]caught|Segmentation[ ]fault|^Killed\b
    |(?:return[ ]code[ ]=|exitcode:)[ ]-(?!15\b)""",
    re.VERBOSE,
)
#: Who has printed a line, as torchrun, mpirun, pdsh and others begin it.
_RANK = re.compile(
    r"^(?:[^\[\n]{0,60}(\[rank\d{1,9}\]):"
    r"|[ \t]{0,9}(?:(\[[a-z]+\d{1,9}\]|[a-z][\w.-]{0,99}\d):|(\[\d+,\d+\])<std(?:err|out)>:))",
    re.MULTILINE,
)
_FRAME = re.compile(r"\bFile [\"'~/<]|<ipython-input|^-+> \d|\.py:\d+ in ", re.MULTILINE)
#: Colours, also where their first character was lost, and the frames of rich's tracebacks.
_PAINT = re.compile("\x1b?\\[[0-9;]{1,20}m|\x1b\\[[0-9;]{0,20}[A-Za-z]|[│┃]")
_BEGIN = "Traceback (most recent call last)"
#: Between an error and the one that it led to; above one that nothing came of; errors that led on.
_LED_TO = re.compile("The above exception was the direct|During handling of the above exception")
_IGNORED = "Exception ignored in"
_CHAIN = 8
#: Lines of a message, and of the traceback before it, that are looked at.
_MESSAGE, _TRACEBACK = 12, 400
#: Ranks whose errors are looked at, and letters of a question.
_RANKS, _QUESTION = 4096, 1000
#: Of code and of messages: braces, calls, paths, names of several parts.
_NO_QUESTION = re.compile(r"[{}<>]|(?<!\w)=|=(?!\w)|\w\((?!\))|[/.](?!\d)\w+[/.]\w|::")
#: What ds_patches itself says, as a warning or at the end of a traceback; not what is live.
_OURS = re.compile(r"ds_patches[\w.]{0,99}:(?! ?\d+\.\d) ?(\S.+)")
#: What stands for something that is left out.
CUT = "…"
_VERSION = "DeepSpeed info: version="


@dataclass(frozen=True)
class Error:
    """An error as it is printed; a text that has none is one as a whole.

    message: what stands behind the exception's name.
    evidence: the traceback and the message, and whether the log shows DeepCompile.
    has_traceback: whether there is one, so that what it lacks did not happen.
    """

    message: str
    evidence: str
    has_traceback: bool


@dataclass(frozen=True)
class Pasted:
    """What stands in a text.

    errors: the last of each rank, and those that led to it.
    question: the text, if it is a plain and short one; else nothing.
    is_quiet: whether it has several lines, and none of them is an error.
    said: what ds_patches says in it.
    release: DeepSpeed's, as a log tells it.
    """

    errors: tuple[Error, ...]
    question: str
    is_quiet: bool
    said: tuple[str, ...]
    release: Version | None


def read(text: str) -> Pasted:
    """Look through a text of any length."""
    end = _PAINT.sub("", text[-_END:])
    lines = end.splitlines()
    ranks = [*map(_rank, lines)]
    shown = _IS_COMPILED if _COMPILED.search(text) else ""
    errors = [_error(lines, ranks, at, shown) for at in _last(lines, ranks)[-_RANKS:]]
    is_quiet = not errors and "\n" in text.strip()
    is_long = len(text) > _QUESTION
    is_question = not (errors or is_quiet or is_long or _NO_QUESTION.search(text))
    errors = errors or [Error(end, f"{end}\n{shown}", has_traceback=False)]
    question = text if is_question else ""
    return Pasted(tuple(errors), question, is_quiet, said(text), _release(text))


def said(text: str) -> tuple[str, ...]:
    """Return what ds_patches says in a text, each once."""
    return tuple(dict.fromkeys(_OURS.findall(text)))


def alike(text: str) -> str:
    """Return the letters of a text, without what differs from case to case: numbers but 0, ranks.

    CUT stands where something is left out.
    """
    text = _RANK.sub(" ", _PAINT.sub("", text.lower())).replace("...", CUT)
    return re.sub(rf"[^\w{CUT}]|_", "", re.sub(r"\b[1-9]\d*(, [1-9]\d*)*", "N", text))


def _last(lines: list[str], ranks: list[str]) -> list[int]:
    """Return the lines of each rank's last error, and of those that led to it."""
    last: dict[str, list[int]] = {}
    leads: set[str] = set()
    ignores: dict[str, bool] = {}  # and whether its traceback has begun
    for at, (line, rank) in enumerate(zip(lines, ranks, strict=True)):
        if _LED_TO.search(line):
            leads.add(rank)
        elif _IGNORED in line:
            ignores[rank] = False
        elif _BEGIN in line and not ignores.pop(rank, True):  # a second one is not its own
            ignores[rank] = True
        elif _ERROR.search(line):
            if ignores.pop(rank, None) is None:
                last[rank] = [*(last.get(rank, []) if rank in leads else []), at][-_CHAIN:]
            leads.discard(rank)
    return sorted(chain.from_iterable(last.values()))


def _rank(line: str) -> str:
    found = _RANK.match(line)
    return (found[1] or found[2] or found[3]) if found else ""


def _error(lines: list[str], ranks: list[str], at: int, shown: str) -> Error:
    """ranks: of each line."""
    first, end = max(0, at - _TRACEBACK), min(at + _MESSAGE, len(lines))
    before = [*_until_begin(lines, ranks, at, range(at - 1, first - 1, -1))][::-1]
    after = [*_until_begin(lines, ranks, at, range(at + 1, end))]
    message = "\n".join([lines[at], *after])
    traceback = "\n".join(before)
    evidence = f"{traceback}\n{message}\n{shown}"
    return Error(message, evidence, bool(_FRAME.search(f"{traceback}\n{lines[at]}")))


def _until_begin(lines: list[str], ranks: list[str], at: int, others: range) -> Iterator[str]:
    """Yield those of other lines that are of the same rank, up to the begin of a traceback."""
    for other in others:
        if _BEGIN in lines[other]:
            return
        if ranks[other] == ranks[at]:
            yield lines[other]


def _release(text: str) -> Version | None:
    told = text.rpartition(_VERSION)[2] if _VERSION in text else ""
    found = re.match(r"[\w.+]{1,99}", told)
    try:
        return Version(Version(found[0]).public) if found else None
    except InvalidVersion:
        return None
