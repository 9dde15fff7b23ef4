"""`ds-patches prove`: its scripts show what the rows claim."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ds_patches.diagnostics import prove
from ds_patches.diagnostics.defects import DEFECTS, Defect
from ds_patches.diagnostics.proofs import PROOFS, compose, ranks
from tests import shell
from tests.diagnostics.doctor.asking import run
from tests.harness.stock import RELEASE

#: Of the rows that this release has, by name.
HERE = prove.shown(RELEASE)
#: ... and a CPU shows.
ON_CPU = [name for name in HERE if "cuda" not in PROOFS[name].only]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.exhaustive) if n != "retained" else n for n in ON_CPU],
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("retained", signal.SIGTERM),
        ("retained", signal.SIGINT),
        ("retained", signal.SIGKILL),
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
    file.write_text(shell.python("-m", "ds_patches", "prove", "second-backward", "--script").stdout)
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
    assert {*PROOFS} == named


def test_what_it_lists_is_of_this_release() -> None:
    out = run("prove").out
    assert re.findall(r"^  (\S+)", out, re.M) == [*HERE]
    assert max(map(len, out.splitlines())) <= 100
    assert [row["name"] for row in in_json()] == [*HERE]


def in_json(*words: str) -> Any:
    answer = run("prove", *words, "--json")
    result = json.loads(answer.out)
    assert answer.status == result["status"] == 0
    return result["results"]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_wrong(loss: float) -> None:
    run = prove.Run((2.0, loss, 0.5), expected=(2.0, 1.0, 0.5))
    assert (run.off, run.is_right) == (math.inf, False)
    assert json.loads(json.dumps(run.as_json(), allow_nan=False))["off"] == "inf"


@pytest.mark.exhaustive
def test_one_in_json() -> None:
    sides = in_json("retained")
    assert sides["stock"]["error"].startswith("RuntimeError")
    assert (sides["patched"]["right"], sides["stock"]["right"]) == (True, False)


@pytest.mark.exhaustive
def test_all_in_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    only_gpus = "needs a GPU: DeepSpeed refuses fp16 on a CPU"
    monkeypatch.setattr(prove, "shown", lambda _: {n: HERE[n] for n in ("retained", "fp16")})
    first, _, *lines = run("prove", "--all", "--device", "cpu").out.splitlines()
    assert first.startswith(f"DeepSpeed {RELEASE} on two CPU ranks")
    assert re.fullmatch(r"retained  RuntimeError +off by \S+", lines[0])
    assert lines[1:] == [f"fp16      {only_gpus}"]
    monkeypatch.setattr(prove, "shown", lambda _: {"fp16": HERE["fp16"]})
    rows = in_json("--all", "--device", "cpu")
    assert rows == [{"name": "fp16", "shown": True, "sides": [only_gpus]}]


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
def test_a_name_that_no_row_or_file_has(words: list[str], why: str) -> None:
    answer = run("prove", *words)
    assert (answer.status, answer.out, why in answer.err) == (2, "", True)
