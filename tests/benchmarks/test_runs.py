"""A small run of each benchmark, on CPU: every row runs, with the right gradients, and is kept."""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import show
from benchmarks.coalesce import sent_mib
from benchmarks.rows import Row, find
from benchmarks.workload import Workload
from tests.benchmarks.outcome import ROOT, Outcome, outcome_of

pytestmark = pytest.mark.exhaustive

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 "
#: What starts each, with sizes of its own.
COMMANDS = {
    "retain": f"{TORCHRUN}-m benchmarks.retain --layers 2 --width 32 --batch 4 --profile",
    "coalesce": f"{TORCHRUN}-m benchmarks.coalesce --width 32 --batches 4 --backwards 4",
    # A bucket of two small layers and less than a wide one, and one that is smaller than any.
    "stream_safety": f"{TORCHRUN}-m benchmarks.stream_safety --width 32 --batches 4"
    " --reduce-bucket-sizes 2500 500 --micro-steps 2",
    "at_rest": f"{TORCHRUN}-m benchmarks.at_rest --stages 1 3 --micro-steps 1 --width 32",
    "dc_fallback": "-m benchmarks.dc_fallback --skipped nothing half --width 16 --tokens 4",
}
WAYS = {
    None: ["floor"],
    1: ["multi", "native", "no_sync", "ours"],
    2: ["multi", "native", "ours"],
    3: ["multi", "native", "ours", "ours, gather_once"],
}
STREAM_ROWS = [(s, o, m) for s in (1, 2) for o in (False, True) for m in ("stock", "patched")]
#: What tells the rows of a run apart, in their order.
ROWS: dict[str, list[tuple[Any, ...]]] = {
    "retain": [(number,) for number in (1, 2, 4, 5, 6, 7, 8, 9, 10, 3)],
    "coalesce": [(stage, 4, 4, way) for stage, ways in WAYS.items() for way in ways],
    "stream_safety": [(*row, 4, bucket, 2) for bucket in (2500, 500) for row in STREAM_ROWS],
    "at_rest": [(s, 1, 8, mode) for s in (1, 3) for mode in ("patched", "stock", "stock again")],
    "dc_fallback": [("eager", "nothing"), ("eager", "half")],
}
#: What stock raises, by row.
CRASHES = {
    ("retain", 3): "The size of tensor a (0) must match",
    ("coalesce", 1, 4, 4, "no_sync"): "has already been reduced",
}


class Run(Outcome):
    """And its rows, read back."""

    def __init__(self, outcome: Outcome, workload: Workload) -> None:
        super().__init__(outcome.printed, outcome.kept)
        self.workload = workload
        self.rows = workload.read(outcome.kept)

    def row(self, **of: Any) -> Row:
        found = find(self.rows, **of)
        assert found is not None, of
        return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def run(name: str) -> Run:
        command = f"{COMMANDS[name]} --device cpu --steps 2 --warmup 3 --rounds 2 --commit abc"
        kept = tmp_path_factory.mktemp(name) / "run.json"
        outcome = outcome_of(f"{command} --json", kept, OMP_NUM_THREADS="1")
        kind = next(kind for kind in show.KINDS if kind.name == name)
        return Run(outcome, kind(argparse.Namespace(**outcome.kept["options"])))

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_every_row_is_timed_and_right(runs: Any, name: str) -> None:
    run = runs(name)
    assert [tuple(row.of.values())[: len(ROWS[name][0])] for row in run.rows] == ROWS[name]
    for row, of in zip(run.rows, ROWS[name], strict=True):
        if crash := CRASHES.get((name, *of)):
            assert crash in row.error
            continue
        assert row.error is None
        assert [len(block) for block in row.ms] == [2, 2]
        assert all(ms > 0 for block in row.ms for ms in block)
        assert len(row.ms_by_phase) == len(row.host_ms_by_phase) == 2
        assert list(run.workload.wrong(row)) == []
        if name != "dc_fallback" and row.of.get("mode") != "floor":
            assert row.get("gradient_error") < 2e-2


@pytest.mark.parametrize("name", COMMANDS)
def test_all_is_kept_and_says_again_what_was_printed(runs: Any, name: str, tmp_path: Path) -> None:
    run = runs(name)
    origin = run.kept["provenance"]
    assert origin["commit"] == "abc"
    assert origin["ranks"] == "2"
    assert {"torch", "deepspeed", "ds_patches", "device", "date"} <= origin.keys()
    assert [row.plain() for row in run.rows] == run.kept["rows"]
    (tmp_path / "run.json").write_text(json.dumps(run.kept))
    command = [sys.executable, "-m", "benchmarks.show", f"--{name.replace('_', '-')}"]
    words = [*command, str(tmp_path / "run.json")]
    again = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert again.strip() in run.printed
    ratios = [bar for bar in run.kept["bars"] if bar["measured"] is None]
    for bar in ratios:  # nobody counts a CPU's memory; what was not measured must not look held
        assert bar["held"] is None


def test_retain_has_what_a_rank_holds_after_each_backward(runs: Any) -> None:
    for row in runs("retain").rows:
        if row.error is None:
            backwards = [name for name in row.ms_by_phase[0] if name.startswith("backward")]
            assert [held["after"] for held in row.get("held")] == backwards
            assert len(backwards) == (1 if row["number"] in (1, 2, 9) else 2)
            if row["number"] in (2, 4, 5, 6, 7):
                assert [held["available"] for held in row.get("held")] == [0] * len(backwards)
            # The sums: had a loss been lost, the check of the gradients would see it.
            assert (row.get("gradient_error_last_alone") > 0.5) == (row["number"] in (7, 8))
    assert runs("retain").row(number=4).get("collectives")["reduce_scatter"] == 2 * 2


def test_coalesce_ends_where_native_ends_and_counts_the_bytes(runs: Any) -> None:
    whole = 2 * 32 * 32 * 2 / 2**20  # 2 layers in bf16, in MiB
    for row in runs("coalesce").rows:
        if row.error is None and row["stage"] is not None:
            assert row.get("parameter_error") < 2e-2
        if row["mode"] in ("native", "ours", "floor"):
            # Of 2 ranks each sends half of what is reduce-scattered, and all of an all-reduce.
            scattered = row["mode"] != "native" or row["stage"] == 3
            if scattered and "reduce_scatter" not in row.get("collectives"):
                continue  # an older gloo has none
            sent = whole * (0.5 if scattered else 1)
            assert sent_mib(row, reductions=True) == pytest.approx(sent, rel=0.1), row.of
    bars = {bar["name"]: bar for bar in runs("coalesce").kept["bars"]}
    assert bars["reduction bytes, Z1 ours, batch 4"]["bar"] == 0.5
    assert bars["step, Z3 ours, gather_once, batch 4"]["bar"] == 0.75
    assert bars["step, Z3 ours, batch 4"]["measured"] > 0


def test_stream_safety_compares_all_gradients_and_all_parameters(runs: Any) -> None:
    size = (4 + 4 + 4) * 32 * 32 + 2 * 32  # of six Linear layers and two norms
    for row in runs("stream_safety").rows:
        reference = not row["overlap"] and row["mode"] == "stock"
        compared = None if reference else {"differing": 0, "of": 3 * size, "error": 0.0}
        assert row.get("gradients") == compared
        assert row.get("end") == (compared and compared | {"of": 2 * size}), "and AdamW's averages"
        assert row.get("trace") is None


def test_dc_fallback_holds_each_parameter_against_the_first_eager_row(runs: Any) -> None:
    run = runs("dc_fallback")
    first, second = run.rows
    assert first.get("losses")[0] == second.get("losses")[0]
    assert first.get("losses")[0] == sorted(first.get("losses")[0], reverse=True)
    assert first.get("differences") == [None, None] or first.get("differences")[1:] == [None]
    assert len(second.get("differences")[0]) == 7  # the embedding; weights and biases of 3 layers
    assert [cells[-1] for cells in run.table("skipped")] == ["reference", "yes"]


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
        ("stream_safety --stages 3", "the stages are 1 and 2"),
        ("coalesce --rounds 0", "must be 1 or more"),
        ("retain", "start it with torchrun"),
    ],
)
def test_what_cannot_run_is_said_at_once(command: str, complaint: str) -> None:
    words = [sys.executable, "-m", *f"benchmarks.{command}".split()]
    done = subprocess.run(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert complaint in done.stderr
