"""Reads a log: DeepSpeed's release, its settings, and the last error of each rank.

Errors that led to the last one count too. Training went on after all earlier ones.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from packaging.version import Version

#: Matches a log or post of DeepCompile; then `Error.evidence` begins with `_IS_COMPILED`.
_COMPILED = re.compile(
    'deepcompile=True|"deepcompile": ?true|deepspeed/compile/'
    r"|\b[Dd]eep[Cc]ompile\b(?![\"':=]| is enabled but)"
)
_IS_COMPILED = "DeepCompile is on"
#: Characters at a log's end that are searched for errors, and at its start for settings.
_SEARCHED = 1 << 22
_ERROR = re.compile(
    r"""(?<![a-zA-Z0-9_.])(?:\w+\.)*(?!ChildFailed|CalledProcess)
        (?:[A-Z]\w*(?:Error|Exception|Interrupt|EnforceNotMet)
           |(?<=ds_patches[.]core[.]errors[.])\w+)
        (?:[:\uff1a(]|[\s`*]*$)
    |Watchdog[ ]caught|what\(\):|Segmentation[ ]fault|^Killed\b
    |(?:return[ ]code[ ]=|exitcode:)[ ]-(?!15\b)""",
    re.VERBOSE,
)
#: Prefix of a line with the rank that printed it, as torchrun and mpirun write it, but no pytest's.
_RANK = re.compile(
    r"^(?:(?!E )[^\[\n]{0,60}(\[rank\d{1,9}\]):"
    r"|[ \t]{0,9}(?:(\[[a-z]+\d{1,9}\]|[a-z][\w.-]{0,99}\d):|(\[\d+,\d+\])<std(?:err|out)>:))",
    re.MULTILINE,
)
#: Errors that follow from another one; and a line of a training that goes on after an error.
_AFTERMATH = re.compile(
    r"Watchdog|watchdog|(?:exitcode:|return code =) -6\b|SignalException|KeyboardInterrupt"
    r"|BrokenPipeError|ConnectionResetError|MailboxError"
)
_GOES_ON = re.compile(r"\bloss\b")
_FRAME = re.compile(r"\bFile [\"'~/<]|<ipython-input|^-+> \d|\.py:\d+ in ", re.MULTILINE)
_DEEP_FRAME = re.compile(r"(?:torch|deepspeed)/[\w/]{1,200}\.py\b")
#: Escape sequences of colours, also without their first character, and rich's frames.
_COLOUR = re.compile("\x1b?\\[[0-9;]{1,20}m|\x1b\\[[0-9;]{0,20}[A-Za-z]|[│┃]")
_BEGIN = "Traceback (most recent call last)"
#: Text between an error and the next one of a chain; text above an ignored error; chain length.
_LED_TO = re.compile("The above exception was the direct|During handling of the above exception")
_IGNORED = "Exception ignored in"
_MAX_CHAIN = 8
#: Lines of a message and of the traceback before it that are examined; ranks.
_MAX_MESSAGE, _MAX_TRACEBACK, _MAX_RANKS = 12, 400, 4096
#: Lines of a post of one error: what its author writes around it is evidence, too.
_MAX_POST = 60
#: A message of ds_patches, as a warning or an error; not the line on live patches.
_OWN_MESSAGE = re.compile(r"ds_patches[\w.]{0,99}:(?! ?\d+\.\d) ?(\S.+)")
#: Stands for omitted text.
OMITTED = "…"
#: The release as DeepSpeed prints it; and as ds_report, pip and issue templates write it, with a
#: second one, as in "0.16.4 to 0.18.3". A release that a post calls right is not that of its error.
_PRINTED_RELEASE = re.compile(r"DeepSpeed info: version=(\d+\.\d+\.\d+)")
_RELEASE = re.compile(
    r"(?<![\w/-])(?<!install )(?<!fixed in )deepspeed(?:\[\w+\])?"
    r"(?:[\s:=@,|(*`\"'.-]|version|info|release|installed|v(?=\d)){1,60}?(0\.\d+\.\d+)\b"
    r"(?!\W{1,4}(?:correct|works|is fine|has fixed|fixed|fixes)\b)"
    r"(?:[\s,/>→*`-]{1,9}(?:and|or|to|vs\.?|v)?[\s*`]{0,9}(0\.1\d\.\d+)\b)?",
    re.IGNORECASE,
)
#: DeepSpeed's printed configuration, with the first key; and its printed single settings.
_JSON = re.compile(r"(?:json =\s*|^\s*)(\{)(?=\s*\")", re.MULTILINE)
_SETTING = re.compile(r"^.*\bprint\]\s+(\w+) \.{3,}\s(\S+)$", re.MULTILINE)
_PRINTED = {
    "zero_optimization_stage": ("zero_optimization", "stage"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "bfloat16_enabled": ("bf16", "enabled"),
    "fp16_enabled": ("fp16", "enabled"),
}
#: NCCL's watchdog: the collective in which a rank waited.
_WAITS = re.compile(
    r"Watchdog caught .{0,80}WorkNCCL\(SeqNum=\d+, OpType=(?!SEND|RECV|ALLTOALL|COALESCED)(\w+)"
    r"(?:, NumelIn=(\d+))?"
)
_NAMES_DEEPSPEED = re.compile(r"deepspeed|ds_patches|\bzero[-_ ]?(?:stage)?[-_ ]?\d", re.IGNORECASE)
_NAMES_OTHERS = re.compile(r"\bfsdp|fully_shard|megatron|horovod|torchtitan", re.IGNORECASE)
_DIFFER = "ranks wait in different collectives"


@dataclass(frozen=True)
class Error:
    """A printed error; a text without one is an error as a whole.

    line: the first line of the message. message: the whole message, with the exception's name.
    evidence: `_IS_COMPILED` if the log shows DeepCompile, a post as a whole, the traceback and the
        message.
    has_frames: the traceback has frames. has_traceback: it has frames of PyTorch or DeepSpeed, so
        it was not cut to the user's own, and a function that is not in it was not called.
    is_whole_log: a log without an error, longer than a post: its words are not its author's.
    """

    line: str
    message: str
    evidence: str
    has_frames: bool = False
    has_traceback: bool = False
    is_whole_log: bool = False

    @property
    def key(self) -> str:
        """The begin of the message from the exception's name on, which is alike on all ranks."""
        name = _ERROR.search(self.line)
        return normalized(self.line[name.start() if name else 0 :][:200])[:40]


@dataclass(frozen=True)
class Log:
    """The content of a log.

    has_error: False if the log has no error, and `errors` has the whole text.
    names_deepspeed: a line is DeepSpeed's, or names it.
    releases: DeepSpeed's releases in it. config: DeepSpeed's configuration.
    own_messages: the messages of ds_patches.
    """

    errors: tuple[Error, ...]
    has_error: bool
    names_deepspeed: bool
    releases: tuple[Version, ...]
    config: Mapping[str, Any] | None
    own_messages: tuple[str, ...]


def read(text: str) -> Log:
    """Parse a log of any length."""
    end = _COLOUR.sub("", text[-_SEARCHED:])
    lines = end.splitlines()
    ranks = _by_rank(lines)
    places: list[tuple[int, str, str]] = []  # the line number, the traceback, the message
    cut = ""  # a traceback without an error
    for numbers in ranks.values():
        of_rank = [lines[number] for number in numbers]
        last = _last_errors(of_rank)
        places += [(numbers[index], *_parts(of_rank, index)) for index in last]
        rest = "\n".join(of_rank[last[-1] + 1 if last else 0 :][-_MAX_TRACEBACK:])
        if not cut and _FRAME.search(rest) and _IGNORED not in rest:
            cut = rest
    is_post = len(lines) <= _MAX_POST and len(places) < 2 and len({*ranks} - {""}) < 2
    context = f"{_IS_COMPILED * bool(_COMPILED.search(text))}\n{end * is_post}"
    errors = [_error(context, *parts) for _, *parts in sorted(places)[-_MAX_RANKS:]]
    framed = {error.key for error in errors if error.has_frames}
    # A post may have the message in its title, and below it the traceback, which may be cut.
    errors = [error for error in errors if error.has_frames or error.key not in framed]
    if cut and not framed and len({error.key for error in errors}) == 1:
        errors = [_error(context, cut, errors[0].message)]
    for collectives in zip(*_WAITS.findall(end), strict=True):  # names, then sizes
        if len({*collectives} - {""}) > 1:
            line = next(line for line in lines if _WAITS.search(line)).strip()
            errors = [Error(line, _DIFFER, _DIFFER)]
    first_line, evidence = text.strip().partition("\n")[0], f"{context}\n{end}"
    full_text = Error(first_line, end, evidence, is_whole_log=len(lines) > _MAX_POST)
    printed = {*_PRINTED_RELEASE.findall(text)}
    named = {release for releases in _RELEASE.findall(text) for release in releases if release}
    releases = sorted(map(Version, printed or named))
    own_messages = tuple(dict.fromkeys(_OWN_MESSAGE.findall(text)))
    config = _config(_COLOUR.sub("", text[:_SEARCHED]))
    is_about_deepspeed = bool(config or _NAMES_DEEPSPEED.search(text))
    if not is_about_deepspeed and _NAMES_OTHERS.search(text):
        errors, full_text = [], Error(first_line, "", "")
    kept = tuple(errors or [full_text])
    return Log(kept, bool(errors), is_about_deepspeed, tuple(releases), config, own_messages)


def normalized(text: str) -> str:
    """Return a text in the form in which messages are compared.

    Lower case, without spaces, punctuation and ranks; "N" replaces each list of numbers but 0, and
    OMITTED three dots.
    """
    text = _RANK.sub(" ", _COLOUR.sub("", text.lower())).replace("...", OMITTED)
    return re.sub(rf"[^\w{OMITTED}]|_", "", re.sub(r"\b[1-9]\d*(, [1-9]\d*)*", "N", text))


def _config(text: str) -> Mapping[str, Any] | None:
    """Return the last configuration that a text prints, as JSON or in single lines; else None.

    One with ZeRO comes first: a reference model, which does not train, is often last, without it.
    """
    text = _RANK.sub("", text)
    last: dict[str, Any] | None = None
    for start in reversed([match.start(1) for match in _JSON.finditer(text)][-64:]):
        try:
            config, _ = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if "zero_optimization" in config or "train_batch_size" in config:
            if isinstance(zero := config.get("zero_optimization"), dict) and zero.get("stage"):
                return dict(config)
            last = last or dict(config)
    if last is not None:
        return last
    single: dict[str, Any] = {}
    for name, value in _SETTING.findall(text):
        if keys := _PRINTED.get(name):
            is_plain = re.fullmatch(r"[\d.]+|True|False", value)
            setting = json.loads(value.lower()) if is_plain else None
            single[keys[0]] = {keys[1]: setting} if len(keys) > 1 else setting
    return single if "zero_optimization" in single else None


def _by_rank(lines: Sequence[str]) -> dict[str, list[int]]:
    """Return the line numbers of each rank, and under "" those of the lines that name none.

    A line without a rank below a rank's error is a part of its message, which was wrapped.
    """
    ranks: dict[str, list[int]] = {}
    rank, is_message = "", False
    for number, line in enumerate(lines):
        prefix, is_error = _RANK.match(line), bool(_ERROR.search(line))
        if prefix or is_error or not is_message or not line.strip() or _BEGIN in line:
            rank = (prefix[1] or prefix[2] or prefix[3]) if prefix else ""
            is_message = is_error
        ranks.setdefault(rank, []).append(number)
    return ranks


def _last_errors(lines: Sequence[str]) -> list[int]:
    """Return the indices of a rank's last error, and of the errors that led to it."""
    last: list[int] = []
    led_on = is_over = False
    has_begun = None  # None, or for an ignored error if its traceback has begun
    for index, line in enumerate(lines):
        if _LED_TO.search(line):
            led_on = True
        elif _IGNORED in line:
            has_begun = False
        elif _BEGIN in line and has_begun is not None:
            has_begun = None if has_begun else True  # a second traceback is another error's
        elif _ERROR.search(line):
            if has_begun is None and not (is_over and _AFTERMATH.search(line)):
                last = [*(last if led_on else ()), index][-_MAX_CHAIN:]
            led_on, has_begun, is_over = False, None, True
        elif _GOES_ON.search(line):
            is_over = False
    return last


def _parts(lines: Sequence[str], index: int) -> tuple[str, str]:
    """Return the traceback and the message of the error in line `index` of a rank."""

    def is_inside(line: str) -> bool:
        return _BEGIN not in line

    before = reversed(lines[max(0, index - _MAX_TRACEBACK) : index])
    traceback = "\n".join([*takewhile(is_inside, before)][::-1])
    after = takewhile(is_inside, lines[index + 1 : index + _MAX_MESSAGE])
    return traceback, "\n".join([lines[index], *after])


def _error(context: str, traceback: str, message: str) -> Error:
    line = message.partition("\n")[0]
    frames = f"{traceback}\n{line}"
    has_frames, is_deep = bool(_FRAME.search(frames)), bool(_DEEP_FRAME.search(frames))
    evidence = f"{context}\n{traceback}\n{message}"
    return Error(line.strip(), message, evidence, has_frames, is_deep)
