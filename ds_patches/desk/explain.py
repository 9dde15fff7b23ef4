"""`explain`: from an error, a whole log or a question to what it is and what helps.

An error is known by its text, in which numbers but 0 may differ, and by its traceback. A question
is known by its words, if it has all those of a phrase; what depends on the script says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from packaging.version import Version

from ds_patches.core import columns, release
from ds_patches.core.errors import FlagError
from ds_patches.desk import cured, given, messages, pasted, questions
from ds_patches.desk.defects import KNOWN, OLDEST, TESTED, Defect, plain
from ds_patches.desk.pasted import Pasted
from ds_patches.desk.sections import page, section

#: What is found, as exit statuses: it is known; it is not; it depends on the script.
FOUND, UNKNOWN, PERHAPS = 0, 1, 3
#: Answers of one section.
_MOST = 3
#: Bytes of a log's end that are read; of a piece of a stream, and how many; how names of logs end.
_LOG, _PIECE, _PIECES = 1 << 28, 1 << 25, 16
_LOGS = (".log", ".txt", ".out", ".err")
_SEARCH = "search DeepSpeed's issues"
_WHICH = "say which DeepSpeed it is: --release 0.18.4"
#: States in which the answer is most likely another.
_OTHER = ("elsewhere", "untested")
_ASK = "`ds-patches doctor --config FILE` lists what your settings can trigger"
_NOT_KNOWN = (
    "what  not known to ds_patches in these words\n"
    f"do    give the whole traceback; {_SEARCH}; {_ASK}"
)
_QUIET = f"what  no error in this text; many defects that ds_patches cures raise none\ndo    {_ASK}"


@dataclass(frozen=True)
class Answer:
    """What is known.

    is_sure: the text shows that it is this; else it depends on what the script does.
    state: by what a release is cured, as of a Cure, or "elsewhere" if it is not wrong there,
        "untested", "which" if no release is known, "note".
    """

    one: Defect
    is_sure: bool
    state: str
    here: str
    do: str

    @property
    def proof(self) -> str:
        """What shows it on this machine, with this release."""
        return self.one.proof if self.state not in (*_OTHER, "which") else ""

    @property
    def script(self) -> str:
        return plain(self.one.script) or "any script"

    def as_json(self) -> dict[str, Any]:
        found = {"sure": self.is_sure, "state": self.state, "do": self.do, "proof": self.proof}
        named = {"row": self.script, "anchor": self.one.anchor}
        return self.one.as_json() | named | found

    def __str__(self) -> str:
        one = self.one
        if not one.stages:
            what = "what" if self.is_sure else "perhaps"
            return "\n".join(columns.aligned([(what, self.script), ("do", self.do)]))
        script = f"{self.script}, ZeRO {', '.join(map(str, one.stages))}"
        rows = [("if", f"your script does this: {script}"), ("what", plain(one.outcome))]
        if self.is_sure:
            rows = [("what", f"{script}: {plain(one.outcome)}")]
        right = f"from {one.right}" if one.right else f"in no release up to {TESTED}"
        rows.append(("when", f"wrong from {one.first}, right {right}"))
        rows += [("here", self.here), ("do", self.do)]
        if self.proof:
            rows.append(("see", f"ds-patches prove {self.proof}"))
        return "\n".join(columns.aligned(rows))


def explain(text: str, asked: Version | None, *, verbose: bool, as_json: bool) -> int:
    """Print what is known of a text, or a file's, for one release; returns the exit status.

    The release: the one asked for, or the log's own, or the one that is installed.
    verbose: print the sections of the page, too. Raises FlagError if the text has no words.
    """
    whole = _of_file(text)
    if not any(map(str.isalpha, whole)):
        raise FlagError("explain has nothing to explain: there is no word in this text")
    found = pasted.read(whole)
    told, installed = asked or found.release, release.installed()
    version = told or (installed.version if installed else None)
    known = answers(found, version, cured.of_releases(told) if told else cured.here())
    status = _status(found, known)
    if as_json:
        rows = [one.as_json() for one in known]
        shown = {"status": status, "release": str(version or ""), "answers": rows}
        print(json.dumps(shown | {"ds_patches": found.said}, indent=2))
        return status
    told_by_us = [
        f"what  ds_patches says: {line}\ndo    what it says; there is more in {page()}"
        for line in found.said[:_MOST]
    ]
    unknown = [_QUIET if found.is_quiet else _NOT_KNOWN] * (not known and status == UNKNOWN)
    print("\n\n".join([*map(str, known), *unknown, *told_by_us]))
    sections = [*filter(None, map(section, dict.fromkeys(one.one.anchor for one in known)))]
    if sections and verbose:
        print("", *sections, sep="\n")
    elif sections:
        print("\nto read on: the same with -v")
    return status


def piped(stream: BinaryIO) -> str:
    """Return the end of what a stream has, which need not have one: /dev/zero."""
    end = b""
    for _ in range(_PIECES):
        if not (more := stream.read(_PIECE)):
            break
        end = end[-_PIECE:] + more
    return end.decode(errors="replace")


def _of_file(text: str) -> str:
    """Return the content of a file that is named, or the text itself."""
    is_name = len(text.split()) == 1 and ("/" in text or text.endswith(_LOGS))
    if not is_name and not os.path.exists(text):
        return text
    return given.content(Path(text), _LOG, end=True).decode(errors="replace")


def answers(found: Pasted, version: Version | None, by_patch: Mapping[str, str]) -> list[Answer]:
    """Return what is known; by_patch: for each patch, why it would not be applied."""
    rows = [row for error in found.errors for row in messages.show(error)]
    sure = {one for one, is_sure in rows if is_sure}
    sure = {one for one in sure if one.stages} or sure
    quoted = questions.quoted(found.errors[-1].message)
    matched = quoted or sure or {one for one, _ in rows}
    if not matched and found.question:
        wrong = [one for one in KNOWN if version is None or one.is_wrong(version)]
        matched = questions.are_of(found.question, wrong)
    known = []
    for anchor in dict.fromkeys(one.anchor for one in KNOWN if one in matched):
        mine = [one for one in KNOWN if one.anchor == anchor and one in matched]
        here = [one for one in mine if version is None or one.is_wrong(version)]
        shown = here or mine
        is_sure = bool(sure & {*shown}) and len({(one.patch, one.do) for one in shown}) == 1
        known += [_answer(one, is_sure, version, by_patch) for one in shown[:_MOST]]
    return known


def _status(found: Pasted, known: list[Answer]) -> int:
    if any(one.is_sure and one.state not in _OTHER for one in known):
        return FOUND
    if any(one.state not in _OTHER for one in known):
        return PERHAPS
    ours = any(pasted.said(one.message) for one in found.errors)
    return FOUND if ours and not known else UNKNOWN


def _answer(
    one: Defect, is_sure: bool, version: Version | None, by_patch: Mapping[str, str]
) -> Answer:
    if not one.stages:
        return Answer(one, is_sure, "note", "", plain(one.do))
    if version is None:
        return Answer(one, is_sure, "which", "DeepSpeed is not installed", _WHICH)
    here = f"DeepSpeed {version}"
    if one.is_wrong(version):
        cure = cured.cure(one, version, by_patch)
        return Answer(one, is_sure, cure.by, f"{here}: {cure.said}", plain(cure.do))
    if Version(OLDEST) <= version <= Version(TESTED):
        return Answer(one, is_sure, "elsewhere", f"{here} is not known to do this", _SEARCH)
    return Answer(one, is_sure, "untested", f"{here} was not tested", _SEARCH)
