"""What is said of rows that a machine with GPUs would have measured: bars, tables, failures."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import show, trained
from benchmarks.coalesce import Coalesce
from benchmarks.dc_fallback import MODES
from benchmarks.rows import Row, find, ratios
from benchmarks.skipping import SKIPPED, dynamo_counts, model
from benchmarks.stream_safety import Agreement, Reference
from benchmarks.tables import Bar, by_round
from benchmarks.trained import Difference, Trained
from benchmarks.workload import Workload
from tests.benchmarks.outcome import Outcome
from tests.benchmarks.test_kept_runs import named

CPU = torch.device("cpu")
LOST = {"norm": 0.99, "update": 1.0, "gradient": 1.0}
ROUNDING = {"norm": 0.001, "update": 0.1, "gradient": 0.02}


def stream(p2p: str = "no-p2p-") -> tuple[Workload, list[Row]]:
    """A run on two GPUs, that went well."""
    return kept_run(f"stream-safety-{p2p}2026-11-22")


def dc() -> tuple[Workload, list[Row]]:
    """A run in which stock did not train where frames were skipped."""
    return kept_run("dc-fallback-2026-11-21")


def kept_run(name: str) -> tuple[Workload, list[Row]]:
    kind, run = named(name)
    workload = show.of(kind, run)
    return workload, workload.read(run)


def bars(workload: Workload, rows: Sequence[Row], p2p: bool = True) -> dict[str, Bar]:
    return {bar.name: bar for bar in workload.bars(rows, p2p)}


def section(workload: Workload, rows: Sequence[Row]) -> Outcome:
    run = {"rows": [row.plain() for row in rows]}
    return Outcome(workload.section(json.loads(json.dumps(run))), {})


@pytest.mark.parametrize("some", [stream, dc, functools.partial(kept_run, "retain-2026-11-22")])
def test_what_is_kept_today_is_read_back(some: Callable[[], tuple[Workload, list[Row]]]) -> None:
    workload, rows = some()
    assert workload.read(json.loads(json.dumps({"rows": [row.plain() for row in rows]}))) == rows


def test_rounds_of_processes_are_put_together() -> None:
    row = Row({"mode": "eager"})
    for loss, error in ((1.0, None), (2.0, "lost"), (3.0, "later")):
        one = Row({"mode": "eager"}, error, [[loss, loss]], [{"step": loss}])
        one.found["losses"] = [loss]
        row.add(one.plain())
    assert row.by_round == [1.0, 2.0, 3.0]
    assert (row.error, row.get("losses"), len(row.ms_by_phase)) == ("lost", [1.0, 2.0, 3.0], 3)


def test_ratios_are_of_the_rounds() -> None:
    slower = Row({}, ms=[[11.0, 12.0, 13.0], [14.4]])  # the machine became slower by a fifth
    row = Row({}, ms=[[4.0, 5.0, 6.0], [6.0]])
    assert row.by_round == [5.0, 6.0]
    assert ratios(row, slower) == pytest.approx([5 / 12, 5 / 12])
    assert ratios(row, Row({})) == ratios(row, None) == []
    assert by_round([1.0, 0.5]) == "1.000, 0.500"
    assert by_round([1.0, 2.0, 3.0, 4.0, 5.0]) == "quartiles 2.000 to 4.000"


@pytest.mark.parametrize("p2p", [True, False])
def test_bars_differ_where_the_gpus_have_no_peer_to_peer(p2p: bool) -> None:
    found = bars(*stream("" if p2p else "no-p2p-"), p2p)
    step = "step, Z2 overlap, batch 4096, bucket 16,777,216: patched / stock"
    assert found[step].held is (None if p2p else False)
    assert found[step.replace("Z2", "Z1")].bar is None
    coalesce = bars(Coalesce(argparse.Namespace(batches=[256])), [], p2p)
    assert coalesce["step, Z3 ours, gather_once, batch 256"].bar == (0.75 if p2p else 0.65)


def test_numbers_that_overlap_changes_do_not_hold_the_bar() -> None:
    workload, rows = stream()
    patched = find(rows, stage=2, overlap=True, mode="patched")
    assert patched is not None
    name = f"elements unlike overlap off, Z2 overlap patched, {workload.where(patched)}"
    assert bars(workload, rows)[name].held
    for end, held in (({"differing": 3, "of": 8, "error": 2e-5}, False), (None, None)):
        patched.found["end"] = end
        assert bars(workload, rows)[name].held is held
    patched.found["end"] = {"differing": 3, "of": 8, "error": 2e-5}
    text = section(workload, rows).printed
    assert "| equal | NO: 3 of 8, off by 2.0e-05 |" in text
    # As its trace has them: what was hidden, and that part of the whole.
    assert "| Z2 overlap | patched | 179.56 | 98.86 | 54.30 | 44.56 | 55 % | 94.92 |" in text


def test_what_raised_or_does_not_train_has_no_number() -> None:
    workload, rows = dc()
    half = find(rows, mode="stock", skipped="half")
    assert half is not None
    half.error = "RuntimeError: 'weight' must be 2-D\n  while | tracing"
    outcome = section(workload, rows)
    times = {tuple(cells[:2]): cells for cells in outcome.table("skipped")}
    assert list(times) == [(skipped, mode) for skipped in SKIPPED for mode in MODES]
    assert times["nothing", "patched"][2:5] == ["-", "0.300", "0.956"]
    assert times["nothing", "eager"][-1] == "reference"
    assert times["half", "patched"][-1] == "yes"
    assert times["half", "stock"][2] == "RuntimeError: 'weight' must be 2-D while / tracing"
    assert times["all", "stock"][-1] == "NO: not 19 of 19 parameters"
    assert outcome.printed.count("| half | stock |") == 1, "nothing else is known of it"
    lines = workload.series({"rows": [row.plain() for row in rows]})
    notes = {line.name: (line.note, len(line.ratios)) for line in lines}
    assert notes["half skipped, stock over eager"] == ("raises", 0)
    assert notes["all skipped, stock over eager"] == ("does not train", 0)
    assert notes["all skipped, patched over eager"] == ("", 1)
    # What was not measured must not look held.
    assert bars(workload, rows)["compilations, half skipped: patched / stock"].held is None


def wrong(workload: Workload, rows: Sequence[Row]) -> list[str]:
    return [f"{workload.named(row)}: {words}" for row in rows for words in workload.wrong(row)]


def test_rows_that_raise_or_have_wrong_gradients_fail() -> None:
    workload, rows = stream()
    assert wrong(workload, rows) == []
    rows[0].fail(RuntimeError("lost"))
    rows[0].fail(RuntimeError("later"))
    rows[1].found["gradient_error"] = float("nan")
    rows[2].found["gradient_error"] = 0.5
    where = workload.where(rows[0])
    assert wrong(workload, rows) == [
        f"Z1 stock, {where}: RuntimeError: lost",
        f"Z1 patched, {where}: gradients are off by nan",
        f"Z1 overlap stock, {where}: gradients are off by 0.5",
    ]


def test_coalesce_fails_where_parameters_or_bytes_are_off() -> None:
    workload, rows = kept_run("coalesce-2026-11-22")
    assert wrong(workload, rows) == [], "no_sync raises what it is known for"
    by_mode = {row["mode"]: row for row in rows if row["stage"] in (1, 3)}
    by_mode["ours"].found["parameter_error"] = 0.5
    by_mode["native"].found["sent"].append({"kind": "reduce", "phase": "exit", "bytes": 1})
    by_mode["no_sync"].error = "RuntimeError: another"
    assert [words.partition(": ")[2] for words in wrong(workload, rows)] == [
        "RuntimeError: another",
        "0 reduce ran, 1 were seen: its bytes are off",
        "parameters are off by 0.5",
    ]


def test_retain_fails_where_stock_does_not() -> None:
    workload, rows = kept_run("retain-2026-11-22")
    assert wrong(workload, rows) == []
    crash = find(rows, number=3)
    assert crash is not None
    crash.error = None
    assert wrong(workload, rows) == ["3 stock, K=2: not the known crash: it ran"]


def test_stock_may_fail_where_frames_are_skipped_and_nothing_else_may() -> None:
    workload, rows = dc()
    assert wrong(workload, rows) == []
    for row in rows:
        row.found["differences"] = [{"head.weight": LOST}]
    assert {failure.partition(":")[0] for failure in wrong(workload, rows)} == {
        f"{mode}, {skipped} skipped"
        for mode in MODES
        for skipped in SKIPPED
        if mode != "stock" or skipped == "nothing"
    }


@pytest.mark.parametrize("gradient", [0.5, float("nan")])
def test_gradients_that_lack_a_factor_fail_and_so_does_a_row_that_nobody_compared(
    gradient: float,
) -> None:
    workload, rows = dc()
    row = find(rows, mode="patched", skipped="nothing")
    assert row is not None
    off = {"norm": 0.0, "update": 0.0, "gradient": gradient}
    row.found["differences"] = [{"a": ROUNDING, "b": off, "c": ROUNDING}]
    assert list(workload.wrong(row)) == [f"gradients are off by {gradient}"]
    row.found["differences"] = [None]
    assert list(workload.wrong(row)) == ["not compared with eager ZeRO-3"]


def test_one_bit_is_a_difference() -> None:
    ones = torch.ones(8)
    assert Agreement.between([ones, ones], [ones, ones]) == Agreement(0, 16, 0.0)
    other = torch.ones(8)
    other[3] = torch.nextafter(ones[3], torch.tensor(2.0))
    found = Agreement.between([ones, other], [ones, ones])
    assert (found.differing, found.of) == (1, 16)
    assert 0 < found.error < 1e-6
    other[3] = float("nan")
    assert Agreement.between([other], [ones]).error != Agreement.between([other], [ones]).error


def test_overlap_is_held_against_the_first_row_without_of_its_stage() -> None:
    reference = Reference()

    def row(stage: int, overlap: bool, value: float) -> int | None:
        of = {"stage": stage, "overlap": overlap}
        found = reference.against(Row(of), [torch.full((2,), value)])
        return None if found is None else int(found["differing"])

    assert row(1, True, 1.0) is None, "nothing to be held against"
    assert row(1, False, 1.0) is None
    assert row(2, False, 2.0) is None
    assert [row(1, True, 1.0), row(1, True, 2.0), row(2, True, 2.0)] == [0, 2, 0]
    assert row(1, False, 1.0) == 0


@pytest.mark.parametrize(
    ("skipped", "graphs", "breaks"), [("nothing", 1, 0), ("half", 2, 1), ("all", 0, 0)]
)
def test_dynamo_skips_what_the_row_says(skipped: str, graphs: int, breaks: int) -> None:
    made = model(skipped, layers=4, width=8, words=8, device=CPU)
    torch._dynamo.reset()
    made.compile(backend="eager")
    before = dynamo_counts()
    for _ in range(2):
        made(*torch.zeros(2, 1, 2, dtype=torch.long)).backward()
    after = dynamo_counts()
    assert after["graphs"] - before["graphs"] == graphs
    assert after["graph_breaks"] - before["graph_breaks"] == breaks


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
