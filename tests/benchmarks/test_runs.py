"""A small run of each benchmark, on CPU: every row runs, with the right gradients, and is kept."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import show
from benchmarks.rows import Run
from benchmarks.workload import Workload
from tests.benchmarks import ROOT, table

pytestmark = pytest.mark.exhaustive

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 "
#: What starts each, with sizes of its own.
COMMANDS = {
    "retain": f"{TORCHRUN}-m benchmarks.retain --layers 2 --width 32 --batch 4",
    "coalesce": f"{TORCHRUN}-m benchmarks.coalesce --width 32 --batches 4 --backwards 4",
    # A bucket of two small layers and less than a wide one, and one that is smaller than any.
    "stream_safety": f"{TORCHRUN}-m benchmarks.stream_safety --width 32 --batches 4"
    " --reduce-bucket-sizes 2500 500 --micro-steps 2",
    "at_rest": f"{TORCHRUN}-m benchmarks.at_rest --stages 1 3 --micro-steps 1 --width 32",
    "dc_fallback": "-m benchmarks.dc_fallback --skipped nothing half --width 16 --tokens 4",
}
MODES = ("stock", "patched")
#: What tells the rows of a run apart, in their order.
ROWS: dict[str, list[tuple[Any, ...]]] = {
    "retain": [(number,) for number in (1, 2, 4, 5, 6, 7, 8, 9, 10, 3)],
    "coalesce": [(stage, 4, 4, way) for stage in (1, 2, 3) for way in ("multi", "native", "ours")]
    + [(3, 4, 4, "ours, default"), (3, 4, 4, "ours, gather_once")],
    "stream_safety": [*product((2,), (4,), (2500, 500), (1, 2), (False, True), MODES)],
    "at_rest": [*product((1, 3), (1,), (8,), ("patched", "stock", "stock again"))],
    "dc_fallback": [("nothing", "eager"), ("half", "eager")],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def run(name: str) -> tuple[str, Path, Workload, Run]:
        kept = tmp_path_factory.mktemp(name) / "run.json"
        same = f"--device cpu --steps 2 --warmup 3 --rounds 2 --commit abc --json {kept}"
        words = [sys.executable, *f"{COMMANDS[name]} {same}".split()]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        kind = next(kind for kind in show.KINDS if kind.name == name)
        return done.stdout, kept, *show.load(kind, kept)

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_every_row_is_timed_and_right(runs: Any, name: str) -> None:
    _, _, workload, kept = runs(name)
    rows = workload.read(kept)
    assert [tuple(row.of.values())[: len(ROWS[name][0])] for row in rows] == ROWS[name]
    for row in rows:
        assert list(workload.wrong(row)) == []
        if row.of.get("number") == 3:
            assert "The size of tensor a (0) must match" in row.error
            continue
        assert row.error is None
        assert [len(block) for block in row.ms] == [2, 2]
        assert all(ms > 0 for block in row.ms for ms in block)
        assert len(row.ms_by_phase) == len(row.host_ms_by_phase) == 2
        if name != "dc_fallback":
            assert row.get("gradient_error") < 2e-2


@pytest.mark.parametrize("name", COMMANDS)
def test_all_is_kept_and_says_again_what_was_printed(runs: Any, name: str) -> None:
    printed, path, workload, kept = runs(name)
    origin = kept["provenance"]
    assert origin["commit"] == "abc"
    assert origin["ranks"] == "2"
    assert {"torch", "deepspeed", "ds_patches", "device", "date"} <= origin.keys()
    assert [row.plain() for row in workload.read(kept)] == kept["rows"]
    command = [sys.executable, "-m", "benchmarks.show", f"--{name.replace('_', '-')}", str(path)]
    again = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert again.strip() in printed
    for bar in kept["bars"]:  # nobody counts a CPU's memory; it must not look held
        assert bar["held"] is None or bar["measured"] is not None


def test_retain_looks_after_each_backward(runs: Any) -> None:
    for row in runs("retain")[3]["rows"]:
        if row["error"] is None:
            backwards = [name for name in row["ms_by_phase"][0] if name.startswith("backward")]
            assert [held["after"] for held in row["held"]] == backwards
            assert len(backwards) == (1 if row["number"] in (1, 2, 9) else 2)


def test_dc_fallback_holds_each_parameter_against_the_first_eager_row(runs: Any) -> None:
    printed, _, _, kept = runs("dc_fallback")
    first, second = (row["differences"] for row in kept["rows"])
    assert first[0] is None
    assert len(second[0]) == 7  # the embedding; weights and biases of 3 layers
    assert [cells[-1] for cells in table(printed, "skipped")] == ["yes", "yes"]


def test_a_row_that_is_not_done_in_time_failed_and_is_not_started_again(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    command = (
        f"-m benchmarks.dc_fallback --device cpu --skipped all --seconds 1 --rounds 2 --json {kept}"
    )
    words = [sys.executable, *command.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "FAILED: eager, all skipped: not done after 1 s" in done.stdout
    assert done.stdout.count("eager, all skipped: not done") == 2, "once when it ended, once failed"
    (row,) = json.loads(kept.read_text())["rows"]
    assert row["ms"] == []


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("dc_fallback --device cpu --modes eager stock", "DeepCompile needs CUDA"),
        ("coalesce --rounds 0", "must be 1 or more"),
        ("retain", "start it with torchrun"),
    ],
)
def test_what_cannot_run_is_said_at_once(command: str, complaint: str) -> None:
    words = [sys.executable, "-m", *f"benchmarks.{command}".split()]
    done = subprocess.run(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert complaint in done.stderr
