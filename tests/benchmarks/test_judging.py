"""What is said of rows that a machine with GPUs would have measured: bars, tables, failures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import trained
from benchmarks.coalesce import Coalesce
from benchmarks.dc_fallback import MODES, SKIPPED, DcFallback, dynamo_counts
from benchmarks.rows import Row, find, ratios
from benchmarks.skipping import model
from benchmarks.stream_safety import Agreement, Reference, StreamSafety
from benchmarks.tables import Bar, by_round
from benchmarks.trace import kernels, shares
from benchmarks.trained import Difference, Trained
from benchmarks.workload import Workload
from tests.benchmarks.outcome import Outcome
from tests.benchmarks.test_trace import trace_of

CPU = torch.device("cpu")
WHERE = "batch 4, bucket 2,500"
RAISED = "RuntimeError: 'weight' must be 2-D\n  while | tracing"
LOST = {"norm": 0.99, "update": 1.0, "gradient": 1.0}
ROUNDING = {"norm": 0.001, "update": 0.1, "gradient": 0.02}
STREAM = StreamSafety(argparse.Namespace(patch="stream_safety"))
DC = DcFallback(argparse.Namespace(steps=3))


def two_rounds(row: Row, ms: float, *phases: str) -> Row:
    """The second on a machine that had become slower by a fifth."""
    row.ms = [[ms - 1, ms, ms + 1], [1.2 * ms]]
    row.ms_by_phase = [dict.fromkeys(phases, 2.0)] * 2
    return row


def stream_rows() -> list[Row]:
    rows = []
    for stage, overlap, mode in [
        (s, o, m) for s in (1, 2) for o in (False, True) for m in MODES[1:]
    ]:
        of = dict(zip(STREAM.keys, (stage, overlap, mode, 4, 2500, 1), strict=True))
        is_stock = mode == "stock"
        agreement = {"differing": 0, "of": 12, "error": 0.0} if overlap else None
        end = {"differing": 3, "of": 8, "error": 2e-5} if overlap and is_stock else agreement
        trace = {name: asdict(one) for name, one in shares(kernels(trace_of(0, 5))).items()}
        found = {"gradient_error": 1e-3, "gradients": agreement, "end": end, "trace": trace}
        ms = 20.0 if is_stock or not overlap else 16.0
        rows.append(two_rounds(Row(of, found=found), ms, "forward", "backward", "step"))
    return rows


def dc_rows() -> list[Row]:
    """Stock does what 0.19.2 or 0.19.8 did."""
    rows = []
    for skipped in SKIPPED:
        for mode, ms in zip(MODES, (12.0, 5.0, 5.0), strict=True):
            row = Row({"mode": mode, "skipped": skipped})
            rows.append(row)
            if (mode, skipped) == ("stock", "half"):
                row.error = RAISED
                continue
            lost = (mode, skipped) == ("stock", "all")
            peak = 744.0 if mode == "eager" or skipped == "all" else 2596.0
            names = {"head.weight": ROUNDING, "upper.0.weight": LOST if lost else ROUNDING}
            graphs = {"graphs": 0 if mode == "eager" else 4, "frames": 2, "graph_breaks": 1}
            row.found = {
                "losses": [[8.3178] * 10] * 2,
                "first_peaks": [[{"whole": 2 * peak, "backward": peak}]] * 2,
                "peak": [{"whole": peak, "backward": peak / 2}] * 2,
                "compilations": [graphs] * 2,
                "recompilations": [0, 0],
                "differences": [None if (mode, skipped) == ("eager", "nothing") else names, None],
            }
            two_rounds(row, ms, "forward", "backward", "step")
    return rows


def run_of(rows: Sequence[Row], **settings: str) -> Any:
    origin = {"date": "2026-11-22T10:00:00", "ranks": "2", "device": "GPU", "deepspeed": "0.19.8"}
    kept = {"provenance": origin | settings, "rows": [row.plain() for row in rows]}
    return json.loads(json.dumps(kept))


def printed(workload: Workload, rows: Sequence[Row], **settings: str) -> Outcome:
    return Outcome(workload.section(run_of(rows, **settings)), {})


def bars(workload: Workload, rows: Sequence[Row], p2p: bool = True) -> dict[str, Bar]:
    return {bar.name: bar for bar in workload.bars(rows, p2p)}


@pytest.mark.parametrize(("workload", "rows"), [(STREAM, stream_rows()), (DC, dc_rows())])
def test_what_is_kept_is_read_back(workload: Workload, rows: list[Row]) -> None:
    assert workload.read(run_of(rows)) == rows


def test_rounds_of_processes_are_put_together() -> None:
    row = Row({"mode": "eager"})
    for loss, error in ((1.0, None), (2.0, "lost"), (3.0, "later")):
        one = Row(
            {"mode": "eager"}, error, [[loss, loss]], [{"step": loss}], found={"losses": [loss]}
        )
        row.add(one.plain())
    assert row.by_round == [1.0, 2.0, 3.0]
    assert (row.error, row.get("losses"), len(row.ms_by_phase)) == ("lost", [1.0, 2.0, 3.0], 3)


def test_ratios_are_of_the_rounds() -> None:
    rows = dc_rows()
    eager, patched, stock = (
        find(rows, mode=mode, skipped=skipped)
        for mode, skipped in (("eager", "nothing"), ("patched", "nothing"), ("stock", "half"))
    )
    assert patched is not None
    assert patched.by_round == [5.0, 6.0]
    assert ratios(patched, eager) == pytest.approx([5 / 12, 5 / 12])
    assert ratios(patched, stock) == []
    assert ratios(patched, None) == []
    assert by_round([1.0, 0.5]) == "1.000, 0.500"
    assert by_round([1.0, 2.0, 3.0, 4.0, 5.0]) == "quartiles 2.000 to 4.000"


@pytest.mark.parametrize("p2p", [True, False])
def test_bars_differ_where_the_gpus_have_no_peer_to_peer(p2p: bool) -> None:
    step = f"step, Z2 overlap, {WHERE}: patched / stock"
    found = bars(STREAM, stream_rows(), p2p)
    assert found[step].measured == pytest.approx(0.8)
    assert found[step].held is (None if p2p else True)
    assert found[step.replace("Z2", "Z1")].bar is None
    coalesce = bars(Coalesce(argparse.Namespace(batches=[256])), [], p2p)
    assert coalesce["step, Z3 ours, gather_once, batch 256"].bar == (0.75 if p2p else 0.65)


def test_numbers_that_overlap_changes_do_not_hold_the_bar() -> None:
    rows = stream_rows()
    patched = find(rows, stage=2, overlap=True, mode="patched")
    assert patched is not None
    name = f"elements unlike overlap off, Z2 overlap patched, {WHERE}"
    assert bars(STREAM, rows)[name].held
    for end, held in (({"differing": 1, "of": 8, "error": 1e-9}, False), (None, None)):
        patched.found["end"] = end
        assert bars(STREAM, rows)[name].held is held


def test_the_bars_of_dc_fallback() -> None:
    found = bars(DC, dc_rows())
    for name, measured, bar in (
        ("step, nothing skipped: patched / stock", 1.0, 1.01),
        ("step, half skipped: patched / eager", 5 / 12, 1.0),
        ("peak, all skipped: patched / eager", 1.0, 1.10),
        ("peak of forward and backward, all skipped: patched / eager", 1.0, 1.10),
        ("peak from the first step on, all skipped: patched / eager", 1.0, 1.10),
        ("compilations, nothing skipped: patched / stock", 1.0, 1.0),
        # Stock raised there: what was not measured must not look held.
        ("compilations, half skipped: patched / stock", None, 1.0),
    ):
        assert found[name].measured == (measured if measured is None else pytest.approx(measured))
        assert found[name].bar == bar
        assert found[name].held is (None if measured is None else True)


def test_the_tables_say_what_is_hidden_and_what_differs() -> None:
    text = printed(STREAM, stream_rows(), NCCL_P2P_DISABLE="1").printed
    assert "| Z2 overlap | patched | - | 0.800 |" in text
    assert "| equal | NO: 3 of 8, off by 2.0e-05 |" in text
    backward = "20.00 | 15.00 | 7.00 | 8.00 | 8.00 |"
    assert f"| Z2 overlap | stock | 40.00 | 19.00 | 7.00 | 12.00 | 37 % | {backward}" in text
    assert "| <= 0.9 | yes |" in text


def test_the_tables_say_what_raised_and_what_does_not_train() -> None:
    outcome = printed(DC, dc_rows())
    times = {tuple(cells[:2]): cells for cells in outcome.table("skipped")}
    assert list(times) == [(skipped, mode) for skipped in SKIPPED for mode in MODES]
    assert times["nothing", "patched"][2:5] == ["-", "0.417", "1.000"]
    assert times["nothing", "eager"][-1] == "reference"
    assert times["half", "patched"][-1] == "yes"
    assert times["half", "stock"][2] == "RuntimeError: 'weight' must be 2-D while / tracing"
    assert times["all", "stock"][-1] == "NO: not 1 of 2 parameters"
    assert outcome.printed.count("| half | stock |") == 1, "nothing else is known of it"
    assert "| 1.0e+00 | 1.0e+00 | `upper.0.weight` |" in outcome.printed
    notes = {line.name: line.note for line in DC.series(run_of(dc_rows()))}
    assert notes["half skipped, stock over eager"] == "raises"
    assert notes["all skipped, stock over eager"] == "does not train"
    assert notes["all skipped, patched over eager"] == ""


def wrong(workload: Workload, rows: Sequence[Row]) -> list[str]:
    return [f"{workload.named(row)}: {words}" for row in rows for words in workload.wrong(row)]


def test_rows_that_raise_or_have_wrong_gradients_fail() -> None:
    rows = stream_rows()
    assert wrong(STREAM, rows) == []
    rows[0].fail(RuntimeError("lost"))
    rows[0].fail(RuntimeError("later"))
    rows[1].found["gradient_error"] = float("nan")
    rows[2].found["gradient_error"] = 0.5
    assert wrong(STREAM, rows) == [
        f"Z1 stock, {WHERE}: RuntimeError: lost",
        f"Z1 patched, {WHERE}: gradients are off by nan",
        f"Z1 overlap stock, {WHERE}: gradients are off by 0.5",
    ]


def test_stock_may_fail_where_frames_are_skipped_and_nothing_else_may() -> None:
    rows = dc_rows()
    assert wrong(DC, rows) == []
    for row in rows:
        row.found["differences"] = [{"head.weight": LOST}]
    assert {failure.partition(":")[0] for failure in wrong(DC, rows)} == {
        f"{mode}, {skipped} skipped"
        for mode in MODES
        for skipped in SKIPPED
        if mode != "stock" or skipped == "nothing"
    }


@pytest.mark.parametrize("gradient", [0.5, float("nan")])
def test_gradients_that_lack_a_factor_fail_and_so_does_a_row_that_nobody_compared(
    gradient: float,
) -> None:
    row = find(dc_rows(), mode="patched", skipped="nothing")
    assert row is not None
    off = {"norm": 0.0, "update": 0.0, "gradient": gradient}
    row.found["differences"] = [{"a": ROUNDING, "b": off, "c": ROUNDING}]
    assert list(DC.wrong(row)) == [f"gradients are off by {gradient}"]
    row.found["differences"] = [None]
    assert list(DC.wrong(row)) == ["not compared with eager ZeRO-3"]


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
