"""`ds-patches prove`: its scripts show what the rows claim."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ds_patches.__main__ import main
from ds_patches.desk import prove
from ds_patches.desk.defects import DEFECTS, Defect
from ds_patches.desk.proofs import PROOFS, compose, ranks
from tests import shell
from tests.harness.stock import RELEASE

#: Of the rows that this release has, by name.
HERE = prove.shown(RELEASE)
#: ... and a CPU shows.
ON_CPU = [name for name in HERE if "cuda" not in PROOFS[name].only]
QUICK = ("retained", "second-backward")


@pytest.mark.parametrize(
    "name",
    [*QUICK, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ON_CPU if n not in QUICK)],
)
def test_a_proof_shows_what_its_row_claims(name: str) -> None:
    done = shell.python("-m", "ds_patches", "prove", name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: stock is wrong, patched is right" in done.stdout
    (error,) = re.findall(r"^stock: +(.*)$", done.stdout, re.M)
    assert is_claimed(HERE[name], error), error


def is_claimed(row: Defect, error: str) -> bool:
    """A message of the row's, if it has any, of which numbers and names differ."""
    messages = re.findall("`([^`]+)`", row.outcome)
    if error.startswith("off by"):
        return not messages or " or " in row.outcome
    first = [re.split(r"[(\d:]", message)[0].strip() for message in messages]
    return " or " in row.outcome or any(text in " ".join(error.split()) for text in first)


def alive(marked: str) -> list[int]:
    """The processes that have this in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marked.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


@pytest.mark.parametrize(
    ("what", "how"),
    [
        (QUICK[0], signal.SIGINT),
        (QUICK[0], signal.SIGTERM),
        (QUICK[0], signal.SIGKILL),
        ("--all", signal.SIGTERM),
    ],
)
def test_no_rank_is_left_of_a_proof_that_is_ended(
    what: str, how: signal.Signals, tmp_path: Path
) -> None:
    mark = str(tmp_path)
    words = [sys.executable, "-m", "ds_patches", "prove", what]
    own = shell.environment(TMPDIR=mark)
    with subprocess.Popen(words, env=own, cwd=shell.REPOSITORY, stderr=subprocess.DEVNULL) as proof:
        wait_for(lambda: len(alive(mark)) >= 2 + ranks.RANKS)
        proof.send_signal(how)
    assert proof.returncode != 0
    wait_for(lambda: not alive(mark), 10)
    assert how == signal.SIGKILL or not [*tmp_path.rglob("proof.py")]


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.exhaustive
def test_a_reproducer_runs_by_torchrun(tmp_path: Path) -> None:
    """With nothing of ours on the path."""
    file = tmp_path / "reproducer.py"
    file.write_text(shell.python("-m", "ds_patches", "prove", QUICK[1], "--script").stdout)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(file))
    done = shell.python(*launch, variables={"DS_ACCELERATOR": "cpu", "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    assert len(re.findall("^(PyTorch|DeepSpeed)( [-+.e0-9]+){20}$", done.stdout, re.M)) == 4


@pytest.mark.parametrize("name", sorted(PROOFS))
def test_a_reproducer_is_short_and_needs_deepspeed_and_torch_alone(name: str) -> None:
    text = compose(name, 2, "a row: what comes of it")
    compile(text, name, "exec")
    assert "ds_patches" not in text
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 69
    assert max(map(len, text.splitlines())) <= 100


def test_every_proof_is_of_a_row() -> None:
    named = {one.proof for one in DEFECTS if one.proof}
    assert {one.row or name for name, one in PROOFS.items()} == named


def test_what_it_lists_is_of_this_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove"]) == 0
    assert re.findall(r"^  (\S+)", capsys.readouterr().out, re.M) == [*HERE]


def test_all_in_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = {name: HERE[name] for name in ("retained", "fp16")}
    monkeypatch.setattr(prove, "shown", lambda _: two)
    assert prove.prove_all("cpu") == 0
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"DeepSpeed {RELEASE} on two CPU ranks")
    assert re.fullmatch(r"retained  RuntimeError +off by \S+", lines[0])
    assert lines[1:] == ["fp16      needs a GPU: DeepSpeed refuses fp16 on a CPU"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["retain"], "did you mean 'retained'"),
        ([""], "no proof is named ''"),
        (["../retained\n"], "did you mean 'retained'"),
        (["retained", "--svg", "/"], "/ cannot be written"),
        (["fp16", "--device", "cpu"], "fp16 needs a GPU: DeepSpeed refuses fp16 on a CPU"),
        (["retained", "--svg", "/none/of/it.svg"], "/none/of/it.svg cannot be written"),
    ],
)
def test_a_name_that_no_row_or_file_has(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", *words]) == 2
    said = capsys.readouterr()
    assert (why in said.err, said.out) == (True, "")
