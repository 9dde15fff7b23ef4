"""benchmarks.dc_fallback without a GPU: eager rows on CPU, and the tables of recorded runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.dc_fallback import page, trained
from benchmarks.dc_fallback.bars import bars
from benchmarks.dc_fallback.measure import dynamo_counts
from benchmarks.dc_fallback.results import (
    Compilations,
    Difference,
    Measured,
    Peak,
    Row,
    failures,
    find,
    ratios,
)
from benchmarks.dc_fallback.rows import ALL, EAGER, HALF, MODES, NOTHING, PATCHED, SKIPPED, STOCK
from benchmarks.dc_fallback.table import section
from benchmarks.dc_fallback.trained import Trained
from benchmarks.dc_fallback.workload import Workload
from tests.outcome import ROOT, Outcome, outcome_of

DRIVER = "-m benchmarks.dc_fallback --device cpu --layers 2 --width 16 --words 32 --tokens 4"
PARAMETERS = 7  # the embedding, and weight and bias of two layers and the head
CPU = torch.device("cpu")
RAISED = "RuntimeError: 'weight' must be 2-D\n  while | tracing"
MS = {EAGER: 12.0, STOCK: 5.0, PATCHED: 5.0}
LOST = Difference(norm=0.99, update=1.0, gradient=1.0)
ROUNDING = Difference(norm=0.001, update=0.1, gradient=0.02)


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    kept = tmp_path_factory.mktemp("dc_fallback") / "dc-fallback.json"
    command = f"{DRIVER} --skipped {NOTHING} {HALF} --warmup 3 --steps 2 --commit abc --json"
    return outcome_of(command, kept, OMP_NUM_THREADS="1")


@pytest.mark.exhaustive
def test_eager_rows_run_in_processes_of_their_own(eager: Outcome) -> None:
    assert eager.kept["provenance"]["commit"] == "abc"
    assert eager.kept["provenance"]["ranks"] == "2"
    assert [(row["mode"], row["skipped"]) for row in eager.kept["rows"]] == [
        (EAGER, NOTHING),
        (EAGER, HALF),
    ]
    for row in eager.kept["rows"]:
        (one,) = row["rounds"]
        assert one["error"] is None
        assert len(one["ms"]) == 2
        assert list(one["ms_by_phase"]) == ["forward", "backward", "step"]
        assert one["losses"] == sorted(one["losses"], reverse=True)
        assert len(one["losses"]) == 3


@pytest.mark.exhaustive
def test_each_parameter_is_held_against_the_first_eager_row(eager: Outcome) -> None:
    first, second = (row["rounds"][0] for row in eager.kept["rows"])
    assert first["differences"] is None
    assert len(second["differences"]) == PARAMETERS
    assert first["losses"] == second["losses"]
    assert [cells[-1] for cells in eager.table("skipped")] == ["reference", "yes"]


@pytest.mark.exhaustive
def test_a_row_that_is_not_done_in_time_is_recorded_as_failed(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    command = f"{DRIVER} --skipped {ALL} --seconds 1 --rounds 2 --json {kept}"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"FAILED: {EAGER}, {ALL} skipped: not done after 1 s" in done.stdout
    (row,) = json.loads(kept.read_text())["rows"]
    assert len(row["rounds"]) == 1, "it is not started again"


@pytest.mark.exhaustive
def test_deepcompile_is_refused_on_cpu() -> None:
    command = f"{DRIVER} --modes {EAGER} {STOCK}"
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert b"DeepCompile needs CUDA" in done.stderr


@pytest.mark.parametrize(
    ("skipped", "graphs", "breaks"), [(NOTHING, 1, 0), (HALF, 2, 1), (ALL, 0, 0)]
)
def test_dynamo_skips_what_the_row_says(skipped: str, graphs: int, breaks: int) -> None:
    workload = Workload(layers=4, width=8, words=8, batch=1, tokens=2, reduce_bucket_size=None)
    model = workload.model(skipped, CPU)
    torch._dynamo.reset()
    model.compile(backend="eager")
    before = dynamo_counts()
    for _ in range(2):
        model(*torch.zeros(2, 1, 2, dtype=torch.long)).backward()
    after = dynamo_counts()
    assert after.graphs - before.graphs == graphs
    assert after.graph_breaks - before.graph_breaks == breaks


def test_differences_see_what_does_not_train_and_what_lacks_a_factor(tmp_path: Path) -> None:
    right = Trained(torch.randn(9), torch.randn(9))
    trained.keep(dict.fromkeys("abc", right), tmp_path / "kept.pt")
    now = {
        "a": right,
        "b": Trained(torch.zeros(9), torch.zeros(9)),
        "c": Trained(right.update, right.gradient / 2),
    }
    found = trained.differences(now, tmp_path / "kept.pt", CPU)
    assert found["a"] == Difference(0, 0, 0)
    assert found["b"] == Difference(1, 1, 1)
    assert found["c"].norm == 0
    assert found["c"].gradient == pytest.approx(0.5)
    with pytest.raises(RuntimeError, match="not the same parameters"):
        trained.differences({"a": right}, tmp_path / "kept.pt", CPU)


def measured(mode: str, skipped: str, ms: float) -> Measured:
    """What a row's process would have kept; stock does what 0.19.2 or 0.19.8 did."""
    if (mode, skipped) == (STOCK, HALF):
        return Measured(mode, skipped, error=RAISED)
    lost = (mode, skipped) == (STOCK, ALL)
    peak = 744.0 if mode == EAGER or skipped == ALL else 2596.0
    return Measured(
        mode,
        skipped,
        losses=[8.3178] * 10,
        first_peaks=[Peak(whole=2 * peak, backward=peak)],
        compilations=Compilations(graphs=0 if mode == EAGER else 4, frames=2, graph_breaks=1),
        differences=None
        if (mode, skipped) == (EAGER, NOTHING)
        else {"head.weight": ROUNDING, "upper.0.weight": LOST if lost else ROUNDING},
        ms=[ms - 1, ms, ms + 1],
        ms_by_phase={"forward": 1.0, "backward": 2.0, "step": ms - 3},
        peak=Peak(whole=peak, backward=peak / 2),
    )


def recorded() -> list[Row]:
    """Two rounds, the second on a machine that had become slower by a fifth."""
    return [
        Row(mode, skipped, [measured(mode, skipped, drift * MS[mode]) for drift in (1.0, 1.2)])
        for skipped in SKIPPED
        for mode in MODES
    ]


def run_of(rows: list[Row]) -> dict[str, Any]:
    sizes = {"layers": 8, "width": 2048, "words": 4096, "batch": 4, "tokens": 512}
    origin = {"date": "2026-11-21T10:00:00", "ranks": "2", "device": "GPU", "deepspeed": "0.19.8"}
    document = {
        "provenance": origin,
        "options": sizes | {"warmup": 10, "steps": 3, "rounds": 2},
        "rows": [row.plain() for row in rows],
    }
    return json.loads(json.dumps(document))


def test_what_is_kept_is_read_back() -> None:
    rows = recorded()
    assert [Row.read(row) for row in run_of(rows)["rows"]] == rows


def test_ratios_are_of_the_rounds() -> None:
    rows = recorded()
    eager, patched = find(rows, EAGER, NOTHING), find(rows, PATCHED, NOTHING)
    assert patched is not None
    assert patched.by_round == [5.0, 6.0]
    assert ratios(patched, eager) == pytest.approx([5 / 12, 5 / 12])
    assert ratios(patched, find(rows, STOCK, HALF)) == []


def test_the_bars() -> None:
    found = {bar.name: bar for bar in bars(recorded())}
    assert found["step, nothing skipped: patched / stock"].measured == 1.0
    assert found["step, nothing skipped: patched / stock"].bar == 1.01
    assert found["step, half skipped: patched / eager"].measured == pytest.approx(5 / 12)
    assert found["step, half skipped: patched / eager"].bar == 1.0
    for name in ("peak", "peak of forward and backward", "peak from the first step on"):
        assert found[f"{name}, all skipped: patched / eager"].measured == 1.0
        assert found[f"{name}, all skipped: patched / eager"].bar == 1.10
    assert found["compilations, nothing skipped: patched / stock"].measured == 1.0
    # Stock raised there: what was not measured must not look held.
    assert found["compilations, half skipped: patched / stock"].held is None


def test_the_tables_say_what_raised_and_what_does_not_train() -> None:
    outcome = Outcome(section(run_of(recorded())), {})
    times = {tuple(cells[:2]): cells for cells in outcome.table("skipped")}
    assert list(times) == [(skipped, mode) for skipped in SKIPPED for mode in MODES]
    assert times[NOTHING, PATCHED][2:6] == [
        "-",
        "0.417",
        "1.000",
        "1.00, 2.00, 2.50",
    ]
    assert times[NOTHING, EAGER][-1] == "reference"
    assert times[HALF, PATCHED][-1] == "yes"
    assert times[HALF, STOCK][2] == "RuntimeError: 'weight' must be 2-D while / tracing"
    assert times[ALL, STOCK][-1] == "NO: not 1 of 2 parameters"
    assert outcome.printed.count(f"| {HALF} | {STOCK} |") == 1, "nothing else is known of it"
    assert "| 1.0e+00 | 1.0e+00 | `upper.0.weight` |" in outcome.printed


def test_stock_may_fail_where_frames_are_skipped_and_nothing_else_may() -> None:
    rows = recorded()
    assert list(failures(rows)) == []
    for row in rows:
        for one in row.rounds:
            one.differences = {"head.weight": LOST}
    assert {failure.partition(":")[0] for failure in failures(rows)} == {
        f"{mode}, {skipped} skipped"
        for mode in MODES
        for skipped in SKIPPED
        if mode != STOCK or skipped == NOTHING
    }


@pytest.mark.parametrize("gradient", [0.5, float("nan")])
def test_gradients_that_lack_a_factor_fail(gradient: float) -> None:
    (row,) = rows = [Row(PATCHED, NOTHING, [measured(PATCHED, NOTHING, 5.0)])]
    row.rounds[0].differences = {"a": ROUNDING, "b": Difference(0.0, 0.0, gradient), "c": ROUNDING}
    assert list(failures(rows)) == [f"{PATCHED}, nothing skipped: gradients are off by {gradient}"]


def test_a_row_that_nobody_compared_fails() -> None:
    row = Row(PATCHED, NOTHING, [measured(PATCHED, NOTHING, 5.0)])
    row.rounds[0].differences = None
    assert "not compared" in next(failures([row]))


def test_a_run_is_put_into_the_page_and_drawn_beside_it(tmp_path: Path) -> None:
    written = tmp_path / "benchmarks.md"
    written.write_text((ROOT / "docs/benchmarks-dc-fallback.md").read_text())
    run = tmp_path / "run.json"
    run.write_text(json.dumps(run_of(recorded())))
    command = [sys.executable, "-m", "benchmarks.dc_fallback.page", str(run), str(written)]
    subprocess.run(command, cwd=ROOT, check=True)
    first = written.read_text()
    assert section(run_of(recorded())) in first
    assert "[run.json](run.json)" in first
    assert "## Correct on GPUs" in first
    drawn = (tmp_path / "dc-fallback.svg").read_text()
    for text in (
        "DeepSpeed 0.19.8",
        "half skipped",
        "0.42",
        "stock: raises",
        "stock: does not train",
    ):
        assert f">{text}<" in drawn
    again = {"run.json": json.loads(run.read_text())}
    assert page.filled(first, again) == first, "it stands in the place of what was there"


def test_a_page_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="dc_fallback:begin"):
        page.filled("# A page", {})
