"""What a log tells: its release, its settings, and the errors that it ends in.

Of the errors the last of each rank counts, with those that led to it: others were survived.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from packaging.version import Version

#: Anywhere in a log, as DeepSpeed prints its configuration; and how evidence says so.
_COMPILED = re.compile('deepcompile=True|"deepcompile": ?true|deepspeed/compile/')
_IS_COMPILED = "DeepCompile is on"
#: Letters of a log's end that are looked through for errors, and of its begin for settings.
_END = 1 << 22
_ERROR = re.compile(
    r"""(?<![a-zA-Z0-9_.])(?:\w+\.)*(?!ChildFailed|CalledProcess)
        (?:[A-Z]\w*(?:Error|Exception|Interrupt|EnforceNotMet)
           |(?<=ds_patches[.]core[.]errors[.])\w+)
        (?:[:\uff1a(]|[\s`*]*$)
    |Watchdog[ ]caught|what\(\):|Segmentation[ ]fault|^Killed\b
    |(?:return[ ]code[ ]=|exitcode:)[ ]-(?!15\b)""",
    re.VERBOSE,
)
#: Who has printed a line, as torchrun, mpirun, pdsh and others begin it; not pytest's last one.
_RANK = re.compile(
    r"^(?:(?!E )[^\[\n]{0,60}(\[rank\d{1,9}\]):"
    r"|[ \t]{0,9}(?:(\[[a-z]+\d{1,9}\]|[a-z][\w.-]{0,99}\d):|(\[\d+,\d+\])<std(?:err|out)>:))",
    re.MULTILINE,
)
_FRAME = re.compile(r"\bFile [\"'~/<]|<ipython-input|^-+> \d|\.py:\d+ in ", re.MULTILINE)
_DEEP_FRAME = re.compile(r"(?:torch|deepspeed)/[\w/]{1,200}\.py\b")
#: Colours, also where their first character was lost, and the frames of rich's tracebacks.
_PAINT = re.compile("\x1b?\\[[0-9;]{1,20}m|\x1b\\[[0-9;]{0,20}[A-Za-z]|[│┃]")
_BEGIN = "Traceback (most recent call last)"
#: Between an error and the one that it led to; above one that nothing came of; errors that led on.
_LED_TO = re.compile("The above exception was the direct|During handling of the above exception")
_IGNORED = "Exception ignored in"
_CHAIN = 8
#: Lines of a message, and of the traceback before it, that are looked at; ranks.
_MESSAGE, _TRACEBACK, _RANKS = 12, 400, 4096
#: What ds_patches itself says, as a warning or at the end of a traceback; not what is live.
_OURS = re.compile(r"ds_patches[\w.]{0,99}:(?! ?\d+\.\d) ?(\S.+)")
#: What stands for something that is left out.
CUT = "…"
#: As DeepSpeed prints its own release; and as ds_report, pip, and forms of issues have it.
_OWN_RELEASE = re.compile(r"DeepSpeed info: version=(\d+\.\d+\.\d+)")
_RELEASE = re.compile(
    r"(?<![\w/-])deepspeed(?:\[\w+\])?"
    r"(?:[\s:=@,|(*`\"'.-]|version|info|release|installed|v(?=\d)){1,60}?(0\.\d+\.\d+)\b",
    re.IGNORECASE,
)
#: As DeepSpeed prints its configuration, with the first key; and single settings of it.
_JSON = re.compile(r"(?:json =\s*|^\s*)(\{)(?=\s*\")", re.MULTILINE)
_SETTING = re.compile(r"^.*\bprint\]\s+(\w+) \.{3,}\s(\S+)$", re.MULTILINE)
_PRINTED = {
    "zero_optimization_stage": ("zero_optimization", "stage"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "bfloat16_enabled": ("bf16", "enabled"),
    "fp16_enabled": ("fp16", "enabled"),
}
#: NCCL's watchdog: which collective a rank waited in.
_WAITS = re.compile(
    r"Watchdog caught .{0,80}WorkNCCL\(SeqNum=\d+, OpType=(\w+)(?:, NumelIn=(\d+))?"
)
_DIFFER = "ranks wait in different collectives"


@dataclass(frozen=True)
class Error:
    """An error as it is printed; a text that has none is one as a whole.

    line: the first line of the message. message: what stands behind the exception's name.
    evidence: the traceback and the message, and whether the log shows DeepCompile.
    has_frames: whether there are any. has_traceback: whether there are frames of PyTorch or
        DeepSpeed, so that what they lack did not happen: a traceback may be cut to the user's own.
    """

    line: str
    message: str
    evidence: str
    has_frames: bool = False
    has_traceback: bool = False


@dataclass(frozen=True)
class Log:
    """What stands in a log.

    has_error: whether `errors` are such; else they are the text. releases: that it names.
    config: DeepSpeed's configuration. said: what ds_patches says in it.
    """

    errors: tuple[Error, ...]
    has_error: bool
    releases: tuple[Version, ...]
    config: Mapping[str, Any] | None
    said: tuple[str, ...]


def read(text: str) -> Log:
    """Look through a text of any length."""
    end = _PAINT.sub("", text[-_END:])
    lines = end.splitlines()
    ranks: dict[str, list[int]] = {}  # of each the numbers of its lines
    for number, line in enumerate(lines):
        ranks.setdefault(_rank(line), []).append(number)
    shown = _IS_COMPILED if _COMPILED.search(text) else ""
    places = []
    for numbers in ranks.values():
        own = [lines[number] for number in numbers]
        places += [(numbers[index], own, index) for index in _last(own)]
    places.sort(key=lambda place: place[0])
    errors = [_error(own, index, shown) for _, own, index in places[-_RANKS:]]
    for waits in zip(*_WAITS.findall(end), strict=True):
        if len({*waits} - {""}) > 1:
            line = next(line for line in lines if _WAITS.search(line)).strip()
            errors = [Error(line, _DIFFER, _DIFFER)]
    whole = Error(text.strip().partition("\n")[0], end, f"{end}\n{shown}")
    own_release = {*_OWN_RELEASE.findall(text)}
    releases = sorted(map(Version, own_release or {*_RELEASE.findall(text)}))
    said = tuple(dict.fromkeys(_OURS.findall(text)))
    config = _config(_PAINT.sub("", text[:_END]))
    return Log(tuple(errors or [whole]), bool(errors), tuple(releases), config, said)


def alike(text: str) -> str:
    """Return the letters of a text, without what differs from case to case: numbers but 0, ranks.

    CUT stands where something is left out.
    """
    text = _RANK.sub(" ", _PAINT.sub("", text.lower())).replace("...", CUT)
    return re.sub(rf"[^\w{CUT}]|_", "", re.sub(r"\b[1-9]\d*(, [1-9]\d*)*", "N", text))


def _config(text: str) -> Mapping[str, Any] | None:
    """Return the last configuration in a text, or what single lines print of one."""
    text = _RANK.sub("", text)
    for start in reversed([found.start(1) for found in _JSON.finditer(text)][-64:]):
        try:
            config, _ = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if "zero_optimization" in config or "train_batch_size" in config:
            return dict(config)
    single: dict[str, Any] = {}
    for name, value in _SETTING.findall(text):
        if place := _PRINTED.get(name):
            is_plain = re.fullmatch(r"[\d.]+|True|False", value)
            printed = json.loads(value.lower()) if is_plain else None
            single[place[0]] = {place[1]: printed} if len(place) > 1 else printed
    return single if "zero_optimization" in single else None


def _rank(line: str) -> str:
    found = _RANK.match(line)
    return (found[1] or found[2] or found[3]) if found else ""


def _last(lines: Sequence[str]) -> list[int]:
    """Return which of a rank's lines are its last error, and those that led to it."""
    last: list[int] = []
    leads = False
    is_begun = None  # of an error that is ignored, whether its traceback is
    for index, line in enumerate(lines):
        if _LED_TO.search(line):
            leads = True
        elif _IGNORED in line:
            is_begun = False
        elif _BEGIN in line and is_begun is not None:
            is_begun = None if is_begun else True  # a second one is not its own
        elif _ERROR.search(line):
            if is_begun is None:
                last = [*(last if leads else ()), index][-_CHAIN:]
            leads, is_begun = False, None
    return last


def _error(lines: Sequence[str], index: int, shown: str) -> Error:
    """Return the error in one of a rank's lines, with what is of the same traceback."""

    def is_inside(line: str) -> bool:
        return _BEGIN not in line

    before = reversed(lines[max(0, index - _TRACEBACK) : index])
    traceback = "\n".join([*takewhile(is_inside, before)][::-1])
    after = takewhile(is_inside, lines[index + 1 : index + _MESSAGE])
    message = "\n".join([lines[index], *after])
    evidence = f"{traceback}\n{message}\n{shown}"
    frames = f"{traceback}\n{lines[index]}"
    has_frames, is_deep = bool(_FRAME.search(frames)), bool(_DEEP_FRAME.search(frames))
    return Error(lines[index].strip(), message, evidence, has_frames, is_deep)
