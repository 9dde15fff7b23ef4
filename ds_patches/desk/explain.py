"""`explain`: from an error, a whole log or a question to what it is and what helps.

An error is known by its text, in which numbers but 0 may differ, and by its traceback. A question
is known by its words, if it has all those of a phrase; what depends on the script says so.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from ds_patches.core import columns, files, release
from ds_patches.desk import cured, given, pasted
from ds_patches.desk.pasted import Error, Pasted
from ds_patches.desk.row import Symptom, plain
from ds_patches.desk.symptoms import COMPILED, OLDEST, SYMPTOMS, TESTED

#: What is found, as exit statuses: it is known; it is not; it depends on the script.
KNOWN, UNKNOWN, PERHAPS = 0, 1, 3
#: Answers of one section.
_MOST = 3
#: Bytes of a log's end that are read, and how the names of logs end.
_LOG = 1 << 28
_LOGS = (".log", ".txt", ".out", ".err")
_SEARCH = "search DeepSpeed's issues"
_WHICH = "say which DeepSpeed it is: --release 0.18.4"
#: States in which the answer is most likely another.
_OTHER = ("elsewhere", "untested")
_ASK = "`ds-patches doctor --config FILE` lists what your settings can trigger"
_NOT_KNOWN = (
    f"what  not known to ds_patches: most likely none of what it cures\ndo    {_SEARCH}; {_ASK}"
)
_QUIET = f"what  no error in this text; many defects that ds_patches cures raise none\ndo    {_ASK}"


@dataclass(frozen=True)
class Answer:
    """What is known.

    is_sure: the text shows that it is this; else it depends on what the script does.
    state: by what a release is cured, as of a Cure, or "elsewhere" if it is not wrong there,
        "untested", "which" if no release is known, "note".
    """

    one: Symptom
    is_sure: bool
    state: str
    here: str
    do: str

    def as_json(self) -> dict[str, Any]:
        return self.one.as_json() | {"sure": self.is_sure, "state": self.state, "do": self.do}

    def __str__(self) -> str:
        one = self.one
        if not one.stages:
            what = "what" if self.is_sure else "perhaps"
            return "\n".join(columns.aligned([(what, plain(one.script)), ("do", self.do)]))
        script = f"{plain(one.script)}, ZeRO {', '.join(map(str, one.stages))}"
        rows = [("if", f"your script does this: {script}"), ("what", plain(one.outcome))]
        if self.is_sure:
            rows = [("what", f"{script}: {plain(one.outcome)}")]
        right = f"from {one.right}" if one.right else f"in no release up to {TESTED}"
        rows.append(("when", f"wrong from {one.first}, right {right}"))
        return "\n".join(columns.aligned([*rows, ("here", self.here), ("do", self.do)]))


def _note(script: str, outcome: str, anchor: str, do: str, **more: Any) -> Symptom:
    """What is no defect of some releases has no stages."""
    return Symptom(script, outcome, (), "0", None, "", add=do, anchor=anchor, **more)


# fmt: off
_KNOWN = (
    *SYMPTOMS,
    _note("a parameter is read that is not gathered", "`'weight' must be 2-D`", "not-gathered",
          "at ZeRO-3, call the model that the engine returns, or read the parameter inside "
          "`with deepspeed.zero.GatheredParameters(...)`",
          asked=("`mat2 must be a matrix, got 1-D tensor`",
                 "`out of bounds for storage of size 0`", "setStorage out bounds"),
          shown="deepspeed|must be 2-D|1-D tensor"),
    _note("DeepCompile: up to 0.18.9 on a newer torch; from 0.19.4 on, layers of different shapes",
          "`Guard failed on the same frame it was created`", "guard-failed",
          "up to 0.18.9 upgrade DeepSpeed; from 0.19.4 on apply dc_fallback", shown=COMPILED),
    _note("PyTorch's own message, and right: the first backward has freed the graph",
          "`Trying to backward through the graph a second time`", "second-time",
          "give `retain_graph=True` to every backward over a graph but the last"),
    _note("on a CPU, DeepSpeed builds an operator in the first run, for a minute or so",
          "nothing happens from the start on", "hangs-at-the-start",
          "if it takes longer, remove the lock of a killed build: `ds-patches doctor` names it",
          asked=("nothing happens", "hang from start", "hang cpu start")),
    _note("patches that are not applied where they should be",
          "no message, and nothing is applied", "nothing-applied",
          "run `ds-patches doctor` in the place of your command: it looks for the start-up hook",
          asked=("nothing applied", "patches not applied")),
)
# fmt: on


def explain(text: str, asked: Version | None, *, verbose: bool, as_json: bool) -> int:
    """Print what is known of a text, or a file's, for one release; returns the exit status.

    The release: the one asked for, or the log's own, or the one that is installed.
    verbose: print the sections of the page, too.
    """
    found = pasted.read(_of_file(text))
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
    anchors = dict.fromkeys(one.one.anchor for one in known)
    if verbose:
        print("", *map(section, anchors), sep="\n")
    elif anchors:
        print("\nto read on: the same with -v")
    return status


def _of_file(text: str) -> str:
    """Return the content of a file that is named, or the text itself."""
    is_name = len(text.split()) == 1 and ("/" in text or text.endswith(_LOGS))
    if not is_name and not os.path.exists(text):
        return text
    return given.content(Path(text), _LOG, end=True).decode(errors="replace")


def page() -> Path:
    """Return the page of all sections: in a wheel it is in the package, in a checkout in docs."""
    package = Path(__file__).parents[1]
    places = (package / "troubleshooting.md", package.parent / "docs/troubleshooting.md")
    return next((place for place in places if place.exists()), places[0])


def section(anchor: str) -> str:
    text = files.text(page())
    found = re.search(rf"^####? .+{{ #{anchor} }}\n(?:(?!^##).*\n?)*", text, re.MULTILINE)
    return found[0].replace(f" {{ #{anchor} }}", "") if found else ""


def answers(found: Pasted, version: Version | None, by_patch: Mapping[str, str]) -> list[Answer]:
    """Return what is known; by_patch: for each patch, why it would not be applied."""
    rows = [row for error in found.errors for row in _of_error(error)]
    sure = {one for one, is_sure in rows if is_sure}
    sure = {one for one in sure if one.stages} or sure
    matched = sure or {one for one, _ in rows}
    question = found.question.lower()
    guessed = {one for one in _KNOWN if not matched and _has_words(question, one.asked)}
    known = []
    for anchor in dict.fromkeys(one.anchor for one in _KNOWN if one in matched | guessed):
        mine = [one for one in _KNOWN if one.anchor == anchor and one in matched | guessed]
        here = [one for one in mine if version is None or one.is_wrong(version)]
        shown = here or mine if matched else here
        is_sure = bool(sure) and len({one.cures for one in shown}) == 1
        known += [_answer(one, is_sure, version, by_patch) for one in shown[:_MOST]]
    return known


def _status(found: Pasted, known: list[Answer]) -> int:
    if any(one.is_sure and one.state not in _OTHER for one in known):
        return KNOWN
    if any(one.state not in _OTHER for one in known):
        return PERHAPS
    ours = any(pasted.said(one.message) for one in found.errors)
    return KNOWN if ours and not known else UNKNOWN


def _of_error(error: Error) -> Iterator[tuple[Symptom, bool]]:
    """Yield the rows of an error's message that its traceback allows, and whether it shows them."""
    said = _said(error.message)
    for one, messages in _messages().items():
        if said & messages:
            mark, pattern = one.shown[:1], one.shown.lstrip("?!")
            shown = any(_has(error.evidence, way) for way in pattern.split("|"))
            if shown or (mark not in ("?", "!") and not error.has_traceback):
                yield one, shown and mark != "?"


def _answer(
    one: Symptom, is_sure: bool, version: Version | None, by_patch: Mapping[str, str]
) -> Answer:
    if not one.stages:
        return Answer(one, is_sure, "note", "", plain(one.add))
    if version is None:
        return Answer(one, is_sure, "which", "DeepSpeed is not installed", _WHICH)
    here = f"DeepSpeed {version}"
    if one.is_wrong(version):
        cure = cured.cure(one, version, by_patch)
        return Answer(one, is_sure, cure.by, f"{here}: {cure.said}", plain(cure.do))
    if Version(OLDEST) <= version <= Version(TESTED):
        return Answer(one, is_sure, "elsewhere", f"{here} is not known to do this", _SEARCH)
    return Answer(one, is_sure, "untested", f"{here} was not tested", _SEARCH)


@cache
def _messages() -> dict[Symptom, set[str]]:
    """Return the messages of all that is known, each as `alike` has it."""
    found = {one: re.findall("`(.+?)`", "".join((one.outcome, *one.asked))) for one in _KNOWN}
    return {one: {*map(pasted.alike, texts)} for one, texts in found.items()}


def _has(evidence: str, pattern: str) -> bool:
    """Whether one part of a pattern stands behind the other; each is looked for once."""
    at = 0
    for part in pattern.split(r"[\s\S]*"):
        found = re.compile(part).search(evidence, at)
        if not found:
            return False
        at = found.end()
    return True


def _has_words(question: str, asked: Iterable[str]) -> bool:
    """Whether a question has all words of a phrase, or longer ones: "spike" is in "spikes"."""
    phrases = [phrase.lower().split() for phrase in asked if phrase[0] != "`"]
    return any(all(re.search(rf"\b{word}", question) for word in words) for words in phrases)


def _said(text: str) -> set[str]:
    """Return the messages that stand in a text; of two, one in the other, the longer."""
    text = pasted.alike(text)
    found = {one for one in set().union(*_messages().values()) if _stands_in(text, one)}
    return {one for one in found if not any(one in other for other in found - {one})}


def _stands_in(text: str, message: str) -> bool:
    if "..." not in message:
        return message in text
    return bool(re.search(re.escape(message).replace(r"\.\.\.", ".{1,80}?"), text))
