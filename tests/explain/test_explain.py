"""From the very words that are printed to the answer, for the release at hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from packaging.version import Version

from ds_patches.commands import explain, page, symptoms
from ds_patches.core import registry
from ds_patches.symptoms import CURED, NOT_CURED, SYMPTOMS, TESTED, Symptom
from tests.core import fake

SAID = Path(__file__).with_name("said")
#: What people type, and the section that has to be on top, of the site's search, too.
TYPED = {
    "pop from an empty deque": "empty-deque",
    "Recomputed values for the following tensors have different metadata": "recomputed-values",
    "has no attribute 'ds_grads_remaining'": "grads-remaining",
    "setStorage out of bounds": "set-storage",
    "INFLIGHT": "inflight",
    "has already been reduced. Gradient computed twice": "reduced-twice",
    "Direct calls to tensor.backward() are not supported": "direct-calls",
    "output tensor must have the same type as input tensor": "several-dtypes",
    "mat2 must be a matrix": "gradient-penalty",
    "'weight' must be 2-D": "weight-2d",
    "loss spikes after an upgrade": "clipped",
    "hang at the first step with experts": "experts-hang",
}
#: And what they paste.
PASTED = {
    "setStorage: sizes [1536, 8960], strides [1, 1536], storage offset 0, and itemsize 2 requiring "
    "a storage size of 27525120 are out of bounds for storage of size 0": "set-storage",
    "{'id': 3, 'status': 'INFLIGHT', 'numel': 64, 'ds_numel': 64}": "inflight",
    "mat2 must be a matrix, got 1-D tensor": "weight-2d",
    "grad_norm changed after upgrading": "clipped",
    "DeepSpeedConfigError: The DeepSpeed compression library has been removed.": "removed-section",
    "The size of tensor a (4096) must match the size of tensor b (0)": "size-of-tensor",
    "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage 3": (
        "no-sync"
    ),
}


def answers(text: str, release: str = TESTED) -> list[dict[str, str]]:
    version = Version(release)
    return [*explain.answers(text, version, symptoms.of_releases(version))]


def anchors(found: list[dict[str, str]]) -> list[str]:
    return [one["read"].partition("#")[2] for one in found]


@pytest.mark.parametrize("one", SYMPTOMS, ids=lambda one: f"{one.script}: {one.outcome}")
def test_every_row_is_found_by_its_words(one: Symptom) -> None:
    for text in page.codes(one.outcome) or [one.outcome, f"{one.script}: {one.outcome}"]:
        found = answers(f"[rank1]: RuntimeError: {symptoms.plain(text)}", one.first)
        about = [f for f in found if f["what"].startswith(symptoms.plain(one.script) + ", ZeRO")]
        assert about, found
        right = f"from {one.right}" if one.right else "in no release"
        when = f"wrong from {one.first}, right {right}"
        assert any(f["when"].startswith(when) for f in about), about


def test_every_section_is_found_by_its_messages() -> None:
    """Where they are long enough to mean one section alone."""
    for section in page.sections():
        for message in section.messages:
            said = re.sub(r"<(\w+)>", r"some \1", message)
            found = [one for one, _ in explain.sections(f"ds_patches: {said}")]
            theirs = (page.pattern(other) for one in found for other in one.messages)
            assert section in found or page.pattern(message) in theirs, message


@pytest.mark.parametrize(("text", "anchor"), (TYPED | PASTED).items(), ids=lambda value: value[:40])
def test_what_people_type(text: str, anchor: str) -> None:
    assert anchors(answers(text))[:1] == [anchor]


@pytest.mark.parametrize("file", sorted(SAID.rglob("*.txt")), ids=lambda f: f"{f.parent.name}")
def test_real_tracebacks(file: Path) -> None:
    release = re.match(r"[\d.]+\d", file.name)[0]
    found = answers(file.read_text(encoding="utf-8"), release)
    assert {*anchors(found)} == {file.parent.name}
    assert all(one["here"].startswith(f"DeepSpeed {release}: ") for one in found), found


def test_the_answer_is_that_of_the_release() -> None:
    told = {}
    text = "IndexError: pop from an empty deque"
    for release in ("0.18.9", "0.19.2"):
        (one,) = answers(text, release)
        told[release] = one["here"], one["do"]
    assert told["0.18.9"][0] == "DeepSpeed 0.18.9: cured by zero3_hooks"
    assert told["0.19.2"][0] == "DeepSpeed 0.19.2 is not known to do this"
    assert "report" in told["0.19.2"][1]
    (old,) = answers("'weight' must be 2-D", "0.18.4")
    assert old["here"] == "DeepSpeed 0.18.4: not cured: dc_fallback is for >=0.19.2,<=0.19.8"
    (new,) = answers("'weight' must be 2-D", "0.19.5")
    assert new["here"] == "DeepSpeed 0.19.5: cured by dc_fallback"
    assert "import ds_patches.auto" in new["do"]


@pytest.mark.parametrize("one", SYMPTOMS, ids=lambda one: f"{one.script}: {one.outcome}")
def test_every_release_that_is_wrong_has_an_answer(one: Symptom) -> None:
    releases = {one.first, TESTED if one.right is None else one.first}
    for release, cures in product(releases, ({}, dict.fromkeys(registry.patches(), ""))):
        cure = symptoms.cure(one, Version(release), cures)
        assert cure.said
        assert cure.do
        if cure.by == "upgrade":
            assert Version(cure.do.split()[3]) > Version(release)
    assert one.patch or one not in CURED
    assert not one.patch or one not in NOT_CURED


MINE = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/user/train.py", line 3, in <module>
[rank0]:     batch = batches[7]
[rank0]: IndexError: list index out of range
"""


def test_an_error_of_the_script_is_not_deepspeeds() -> None:
    assert answers(MINE) == []
    theirs = MINE.replace("/home/user/train.py", "/env/deepspeed/runtime/zero/stage_1_and_2.py")
    assert anchors(answers(theirs)) == ["other-gradients"]


def test_a_log_with_several_errors_has_an_answer_for_each() -> None:
    log = "[rank1]: RuntimeError: mat2 must be a matrix\n"
    log += "ds_patches: coalesce is not applied, disabled: DS_PATCHES_SKIP=coalesce\n"
    found = answers(f"{MINE}step 3: loss 2.5\n{log}")
    assert anchors(found) == ["gradient-penalty", ""]
    assert found[-1]["what"] == "<name> is not applied, <state>: <reason>"


def run(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ds_patches", "explain", *words]
    return subprocess.run(
        command, cwd=fake.REPOSITORY, input=text, capture_output=True, text=True, check=False
    )


def test_it_answers_in_five_lines() -> None:
    done = run("--release", "0.18.4", "mat2 must be a matrix")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        *("what", "when", "here", "do", "read")
    ]
    assert "cured by zero3_retain" in done.stdout


def test_it_reads_a_log_and_writes_json() -> None:
    done = run("--json", "--release", "0.18.4", text="RuntimeError: mat2 must be a matrix\n")
    (one,) = json.loads(done.stdout)
    assert one["here"] == "DeepSpeed 0.18.4: cured by zero3_retain"


def test_what_is_not_known_is_said_so() -> None:
    done = run("my dog ate the gradients")
    assert done.returncode == 1
    assert done.stdout.startswith("what  not known\ndo    report it")
    wrong = run("--release", "newest", "mat2")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "newest" in wrong.stderr
    assert "Traceback" not in wrong.stderr
