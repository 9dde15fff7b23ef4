"""From the very words that are printed to the answer, for the release at hand."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.version import Version

from ds_patches.core import registry
from ds_patches.desk import cured, explain, pasted, sections
from ds_patches.desk.defects import KNOWN, TESTED, TOLD, Defect, plain
from tests import shell

CORPUS = Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8")
#: What is no error of DeepSpeed's must be none in any of these.
RELEASES = ("0.16.0", "0.17.6", "0.18.4", TESTED)


class Case(NamedTuple):
    """A text of the corpus. answer: its sections, with "?" where it depends; "-" for none."""

    answer: str
    release: str
    source: str
    text: str


def corpus() -> Iterator[Case]:
    for block in re.split(r"^=== ", CORPUS, flags=re.MULTILINE)[1:]:
        first, _, text = block.partition("\n")
        yield Case(*first.split(), text)


def answers(text: str, release: str = TESTED) -> list[explain.Answer]:
    version = Version(release)
    return explain.answers(pasted.read(text), version, cured.of_releases(version))


def claimed(text: str, release: str) -> set[str]:
    """The sections that a text is said to be of, as the corpus has them."""
    found = [one for one in answers(text, release) if one.state not in explain._OTHER]
    said = {one.one.anchor + "?" * (not one.is_sure) for one in found}
    return said or ({"messages-of-ds_patches"} if pasted.read(text).said else {"-"})


@pytest.mark.parametrize("case", [*corpus()], ids=lambda case: f"{case.answer} {case.source}")
def test_no_claim_is_false(case: Case) -> None:
    for release in RELEASES if case.release == "-" else (case.release,):
        assert claimed(case.text, release) <= {*case.answer.split("|")}, release


def evidence(one: Any) -> str:
    """A line that shows it."""
    shown = one.shown.lstrip("?!").partition("|")[0]
    return re.sub(r"\[\\s\\S\]\*|\.\*", " ", shown).replace("\\", "")


@pytest.mark.parametrize("one", TOLD, ids=lambda one: f"{one.script}: {one.outcome}")
def test_every_row_is_found_by_its_words(one: Defect) -> None:
    for text in re.findall("`(.+?)`", one.outcome):
        log = f'[rank1]: File "{evidence(one)}"\n[rank1]: RuntimeError: {plain(text)}'
        said = [found for found in answers(log, one.first) if found.one is one]
        assert said, answers(log, one.first)
        right = f"from {one.right}" if one.right else "in no release"
        assert f"wrong from {one.first}, right {right}" in str(said[0])


def test_a_row_is_found_by_what_the_pages_say_of_it() -> None:
    """By its cells, and by its section's title, unless that is a message of several rows."""
    titles, others = sections.titles(), {"removed-section", "fp32-meets-half"}
    for one in KNOWN:
        said = [f"{plain(one.script)}\t{plain(one.outcome)}"] * bool(one.stages)
        if (title := titles.get(one.anchor)) and one.anchor not in others:
            said += [plain(title), plain(title).replace("No message, and ", "")]
        for text in said:
            assert one.anchor in [found.one.anchor for found in answers(text, one.first)], text


@pytest.mark.parametrize("one", KNOWN, ids=lambda one: one.anchor)
def test_every_phrase_leads_to_its_section(one: Any) -> None:
    for phrase in one.asked:
        text = phrase.strip("`").replace("...", "coalesce")
        log = f'File "{evidence(one)}"\nRuntimeError: {text}\n' if phrase[0] == "`" else text
        assert one.anchor in [found.one.anchor for found in answers(log, one.first)], phrase


@pytest.mark.parametrize(
    ("text", "release", "here", "do"),
    [
        ("pop from an empty deque", "0.18.9", ": zero3_hooks would cure this", "ds_patches.auto"),
        ("pop from an empty deque", "0.19.2", " is not known to do this", "search"),
        ("has no attribute 'coalesce_grad_reduction'", "0.18.4", ": coalesce would", "auto"),
        ("pop from an empty deque", "0.20.0", " was not tested", "search"),
    ],
)
def test_the_answer_is_that_of_the_release(text: str, release: str, here: str, do: str) -> None:
    text = text.replace("has no", "'DeepSpeedEngine' object has no")
    (one,) = answers(text, release)
    assert one.here.startswith(f"DeepSpeed {release}{here}")
    assert do in one.do


def test_a_guess_is_of_this_release_and_says_if() -> None:
    (one,) = answers("loss spikes after checkpoint", "0.18.4")
    assert str(one).startswith("if    your script does this: bf16 without ZeRO")
    assert answers("loss spikes after checkpoint", "0.19.8") == []


@pytest.mark.parametrize("one", TOLD, ids=lambda one: f"{one.script}: {one.outcome}")
def test_every_release_that_is_wrong_has_an_answer(one: Defect) -> None:
    releases = {one.first, one.first if one.right else TESTED}
    for release, by_patch in product(releases, ({}, dict.fromkeys(registry.patches(), ""))):
        cure = cured.cure(one, Version(release), by_patch)
        assert cure.said
        assert cure.do
        if cure.by == "upgrade":
            assert Version(cure.do.split()[3]) > Version(release)


def run(*words: str, text: str = "") -> Any:
    return shell.python("-m", "ds_patches", "explain", *words, input=text)


def test_it_answers_a_text_a_log_and_in_json() -> None:
    done = run("--release", "0.18.4", "GatheredParameters: Cannot partition a param in flight")
    assert (done.returncode, done.stderr) == (explain.FOUND, "")
    whole = run("-v", "--release", "0.18.4", "Cannot partition a param in flight").stdout
    assert "A parameter is in flight at ZeRO-3 while it is gathered." in whole
    log = "[Rank 0] DeepSpeed info: version=0.18.4+abc, git-hash=abc\nError: mat2 must be a matrix"
    done = run("--json", text=log)
    found = json.loads(done.stdout)
    assert done.returncode == found["status"] == explain.PERHAPS
    assert found["release"] == "0.18.4"
    (one,) = found["answers"]
    assert (one["patch"], one["state"], one["sure"]) == ("zero3_retain", "patch", False)


def test_what_is_not_known_is_said_so() -> None:
    done = run("my dog ate the gradients")
    assert done.returncode == explain.UNKNOWN
    assert done.stdout.startswith("what  not known to ds_patches")
    trained = run(text="step 1, loss 4.25\nstep 2, loss 4.36\n")
    assert trained.returncode == explain.UNKNOWN
    assert trained.stdout.startswith("what  no error in this text; many defects that")
    wrong = run("--release", "newest", "mat2")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "newest" in wrong.stderr


@pytest.mark.parametrize("text", ["", "???", "-"])
def test_a_text_without_words_gets_no_verdict(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.log").write_text("\n\n")
    for done in (run(text), run(text=text), run(str(tmp_path / "job.log"))):
        assert (done.returncode, done.stdout) == (2, "")
        assert "no word in this text" in done.stderr


def test_a_dash_is_the_standard_input() -> None:
    error = "RuntimeError: The size of tensor a (0) must match the size of tensor b (64)"
    assert run("-", text=error).stdout == run(text=error).stdout == run(error).stdout


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none.log"), "job.log", str(tmp_path)):
        done = run(name)
        assert done.returncode == 2
        assert f"{name} cannot be read: " in done.stderr
    assert run("RuntimeError: " + 300 * "a long text").returncode == explain.UNKNOWN
    (tmp_path / "job.log").write_text("IndexError: my own\n")
    assert run(str(tmp_path / "job.log")).returncode == explain.UNKNOWN


def test_lines_of_other_ranks_are_no_part_of_an_error() -> None:
    lines = ("[rank0]: File 'mine.py'", "[rank1]: File 'deepspeed.py'", "[rank0]: ValueError: mine")
    (error,) = pasted.read("\n".join(lines)).errors
    assert "mine.py" in error.evidence
    assert "deepspeed.py" not in error.evidence


SHOWN = "RuntimeError: The size of tensor a (0) must match the size of tensor b (64)"
LED_TO = "\nThe above exception was the direct cause of the following exception:\n\n"
MEANWHILE = "\nDuring handling of the above exception, another exception occurred:\n\n"
LATER = "Traceback (most recent call last):\n  File 'mine.py', line 3\nRuntimeError: step 3"


@pytest.mark.parametrize(
    "end",
    [
        LED_TO + LATER,
        MEANWHILE + LATER,
        f"\nException ignored in: <function x>\n{LATER}",
    ],
)
def test_an_error_that_another_came_of_counts(end: str) -> None:
    def known(text: str) -> set[str]:
        return {one.one.anchor for one in explain.answers(pasted.read(text), Version("0.19.8"), {})}

    assert known(SHOWN)
    assert known(SHOWN + end) == known(SHOWN)
    assert not known(f"{SHOWN}\n{LATER}"), "it was survived"
    begin = LATER.partition("\n")[0]
    ignored = f"Exception ignored in: <function x>\n{begin}\nSignal: 3"
    assert known(f"{ignored}\n{begin}\n{SHOWN}") == known(SHOWN), "what is ignored has its own"


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "long name"])
def test_what_is_no_file_is_told_of_at_once(tmp_path: Path, kind: str) -> None:
    file = tmp_path / ("x" * 300 if kind == "long name" else "job.log")
    shell.is_made_odd(file, kind)
    done = shell.python("-m", "ds_patches", "explain", str(file), timeout=20)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


ERROR = "AnError: Recomputed values for the following tensors have different metadata"
MUCH = 1_000_000
LONG = {
    "our name": "ds_patches" * (MUCH // 10),
    "our modules": "ds_patches." * (MUCH // 11),
    "a path": "/" * MUCH + " x",
    "ranks": "\n".join(f"[rank{i}]: AError: x" for i in range(MUCH // 22)),
    "ranks of long lines": "\n".join(f"{'x' * 1000}{i}: AError: x" for i in range(MUCH // 1000)),
    "we say much": "\n".join(f"ds_patches: say {i}" for i in range(MUCH // 20)),
    "a digit": f"DeepSpeed info: version={'1' * MUCH}",
    "frames": f'  File "{"deepspeed" * (MUCH // 9)}"\n{ERROR}',
    "a word": "why " * (MUCH // 4),
    "an error": f"{ERROR}{'x' * MUCH}",
    "something left out": "pop from an ..." * (MUCH // 15),
    "nothing": "\0" * MUCH,
}


@pytest.mark.parametrize("kind", LONG)
def test_long_lines_and_many_take_no_longer_than_their_length(kind: str) -> None:
    begin = time.process_time()
    found = pasted.read(explain._of_file(LONG[kind]))
    explain._status(found, explain.answers(found, Version("0.18.4"), {}))
    assert time.process_time() - begin < 2


def test_a_stream_without_an_end_is_answered() -> None:
    with Path("/dev/zero").open("rb") as zeros:
        done = shell.python("-m", "ds_patches", "explain", stdin=zeros, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no word in this text" in done.stderr


def test_a_log_of_50_mb_takes_less_than_a_second() -> None:
    lines = "[2026-11-20 10:00:00,000] [INFO] [Rank 0] step=7, skipped=0, loss 2.31\n" * 740_000
    error = "AssertionError: Cannot partition a param in flight\n"
    begin = time.process_time()
    found = pasted.read(lines + error)
    assert time.process_time() - begin < 1
    assert error.strip() in found.errors[-1].message
