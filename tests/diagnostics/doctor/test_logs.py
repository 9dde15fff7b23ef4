"""Logs: their release, their settings, and from the words that are printed to the defect."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.version import Version

from ds_patches.diagnostics import doctor, log, training
from ds_patches.diagnostics.defects import TABLE, TESTED, Defect, plain
from ds_patches.diagnostics.report import Report
from tests import shell
from tests.diagnostics.doctor.asking import cases

#: What is no error of DeepSpeed's must be none in any of these, and where none is named.
RELEASES = ("", "0.16.0", "0.17.6", "0.18.4", TESTED)


class Case(NamedTuple):
    """A text of the corpus. answer: its sections, with "?" where it may be; "-" for none."""

    answer: str
    release: str
    source: str
    text: str


CORPUS = [Case(*words.split(), text) for words, text in cases("corpus.txt")]


def asked(text: str, release: str = "") -> Report:
    case = training.Training(logs=[log.read(text)])
    case.use_printed_settings()
    return doctor.diagnose(case, Version(release) if release else None)


def claimed(text: str, release: str = "") -> set[str]:
    """The sections that a text is said to be of, as the corpus has them."""
    report = asked(text, release)
    said = {f.defect.anchor + "?" * (not f.is_sure) for f in report.findings if f.is_logged}
    return said or ({"messages-of-ds_patches"} if report.case.own_messages else {"-"})


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: f"{case.answer} {case.source}")
def test_no_claim_is_false(case: Case) -> None:
    for release in RELEASES if case.release == "-" else (case.release,):
        answer = claimed(case.text, release)
        assert answer <= {*case.answer.split("|")} or answer == {*case.answer.split("&")}, release


def evidence(defect: Defect) -> str:
    """A line that shows it."""
    shown = defect.shown.lstrip("?!").partition("|")[0]
    return re.sub(r"\[\\s\\S\]\*|\.\*|\(\?.*", " ", shown).replace("\\", "")


@pytest.mark.parametrize("defect", TABLE, ids=lambda one: f"{one.script}: {one.outcome}")
def test_every_message_leads_to_its_row(defect: Defect) -> None:
    """In the release, and where a log names none."""
    for text in defect.raised:
        line = plain(text).replace("...", "coalesce")
        words = f'[rank1]: File "{evidence(defect)}"\n[rank1]: RuntimeError: {line}'
        if not defect.shown.startswith("?(?"):
            for release in (defect.first, "") if defect.stages else ("",):
                found = [f.defect for f in asked(words, release).findings]
                assert defect in found, (text, release)


def test_words_of_a_long_log_are_no_evidence() -> None:
    """Healthy logs hold settings, and words that a post uses to tell what is wrong."""
    for defect in (defect for defect in TABLE if defect.shown.startswith("?")):
        for text in defect.raised:
            lines = ["deepspeed", *["{'loss': 4.7}"] * 60, plain(text), evidence(defect)]
            if not log.read("\n".join(lines)).has_error:
                assert defect not in {f.defect for f in asked("\n".join(lines)).findings}, text


@pytest.mark.parametrize(("release", "text"), cases("releases.txt"))
def test_a_log_tells_its_release(release: str, text: str) -> None:
    assert str(asked(f"{text}KeyError: 7").release or "none") == release


ZERO2 = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}


def printed(config: dict[str, Any]) -> str:
    """As DeepSpeed prints a configuration, each line by a launcher that names the rank."""
    text = f"[INFO] [config.py:986:print_user_config]   json = {json.dumps(config, indent=4)}"
    return "\n".join(f"[default0]:{line}" for line in text.splitlines())


def test_a_log_tells_its_settings() -> None:
    of_json = asked(printed(ZERO2), "0.17.6").findings[0]
    assert of_json.evidence == ("ZeRO 2", '"gradient_accumulation_steps": 4')
    single = "".join(
        f"[INFO] [config.py:1000:print]   {name} ...... {value}\n"
        for name, value in (("gradient_accumulation_steps", 4), ("zero_optimization_stage", 2))
    )
    assert asked(single, "0.17.6").findings[0].defect == of_json.defect


BEGIN = "Traceback (most recent call last):"


def test_ranks_that_print_at_once_are_told_apart() -> None:
    lines = (f"[rank0]: {BEGIN}", "[rank0]: File 'mine.py'", f"[rank1]: {BEGIN}",
             "[rank1]: File 'deepspeed.py'", "[rank0]: ValueError: mine")  # fmt: skip
    (error,) = log.read("\n".join(lines)).errors
    assert "mine.py" in error.evidence
    assert "deepspeed.py" not in error.evidence


def test_what_one_log_rules_out_another_may_show() -> None:
    """Both end in the same message, which was cut; the frames of the first are of another place."""
    cut = "RuntimeError: output tensor must have the same type as input"
    frame = '  File "/env/torch/optim/adam.py", line 7, in step'
    assert claimed(f"{BEGIN}\n{frame}\n{cut}") == {"-"}
    assert claimed(f"{BEGIN}\n{cut}") == {"several-dtypes?"}


ERROR = "AnError: Recomputed values for the following tensors have different metadata"
MUCH = 200_000
LONG = {
    "our name": "ds_patches" * (MUCH // 10),
    "our modules": "ds_patches." * (MUCH // 11),
    "deepspeed": "deepspeed " * (MUCH // 10),
    "a release": f"deepspeed{' ' * MUCH}0.18.4",
    "braces": '{"' * (MUCH // 2),
    "objects": '{"a": 1\n' * (MUCH // 8),
    "a path": "/" * MUCH + " x",
    "ranks": "\n".join(f"[rank{i}]: AError: x" for i in range(MUCH // 22)),
    "ranks of long lines": "\n".join(f"{'x' * 1000}{i}: AError: x" for i in range(MUCH // 1000)),
    "we say much": "\n".join(f"ds_patches: say {i}" for i in range(MUCH // 20)),
    "a digit": f"DeepSpeed info: version={'1' * MUCH}",
    "frames": f'  File "{"deepspeed" * (MUCH // 9)}"\n{ERROR}',
    "an error": f"{ERROR}{'x' * MUCH}",
    "something left out": "pop from an ..." * (MUCH // 15),
    "nothing": "\0" * MUCH,
}


@pytest.mark.parametrize("kind", LONG)
def test_long_lines_and_many_are_read(kind: str) -> None:
    """A search that tries every split of a line would not come back."""
    asked(LONG[kind], "0.18.4")


def test_a_stream_without_an_end_is_answered() -> None:
    with Path("/dev/zero").open("rb") as zeros:
        done = shell.python("-m", "ds_patches", "doctor", "-", stdin=zeros, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no word in" in done.stderr


@pytest.mark.parametrize("is_lightning", [True, False])
def test_lightnings_second_division(is_lightning: bool) -> None:
    """Told by its log and the number of micro steps; elsewhere the script decides."""
    case = training.Training()
    strategy = "initializing deepspeed distributed: GLOBAL_RANK: 0, MEMBER: 1/2\n" * is_lightning
    printed = 'json = {"train_batch_size": 8, "gradient_accumulation_steps": 2}\n'
    case.add("log", strategy + printed)
    case.use_printed_settings()
    findings = doctor.diagnose(case, Version(TESTED)).findings
    (finding,) = (f for f in findings if f.defect.section == "lightning-divides")
    assert finding.counts == is_lightning
