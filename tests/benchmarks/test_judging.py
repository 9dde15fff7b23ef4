"""What is said of rows that a machine with GPUs would have measured: bars, tables, failures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import compiled
from benchmarks.coalesce import Coalesce
from benchmarks.compiled import SKIPPED, graphs, model
from benchmarks.dc_fallback import MODES
from benchmarks.rows import Row, find, ratios
from benchmarks.tables import Bar, by_round
from benchmarks.workload import Workload
from tests.benchmarks import table
from tests.benchmarks.test_kept_runs import kept_run

DC = "dc-fallback-2026-11-21"  # a run in which stock did not train where frames were skipped
ROUNDING = {"gradient": 0.02}


def bars(workload: Workload, rows: Sequence[Row], p2p: bool = True) -> dict[str, Bar]:
    return {bar.name: bar for bar in workload.bars(rows, p2p)}


def wrong(workload: Workload, rows: Sequence[Row]) -> list[str]:
    return [f"{workload.named(row)}: {words}" for row in rows for words in workload.wrong(row)]


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
    workload, rows, _ = kept_run(f"stream-safety-{'' if p2p else 'no-p2p-'}2026-11-22")
    found = bars(workload, rows, p2p)
    step = "step, Z2 overlap, batch 4096, bucket 16,777,216: patched / stock"
    assert found[step].held is (None if p2p else False)
    assert found[step.replace("Z2", "Z1")].bar is None
    coalesce = bars(Coalesce(argparse.Namespace(batches=[256])), [], p2p)
    assert coalesce["step, Z3 ours, gather_once, batch 256"].bar == (0.75 if p2p else 0.65)


def test_what_raised_or_does_not_train_has_no_number() -> None:
    workload, rows, _ = kept_run(DC)
    half = find(rows, mode="stock", skipped="half")
    assert half is not None
    half.error = "RuntimeError: 'weight' must be 2-D\n  while | tracing"
    printed = workload.section({"rows": [row.plain() for row in rows]})
    times = {tuple(cells[:2]): cells for cells in table(printed, "skipped")}
    assert list(times) == [(skipped, mode) for skipped in SKIPPED for mode in MODES]
    assert times["nothing", "patched"][2:5] == ["-", "0.300", "0.956"]
    assert times["nothing", "eager"][-1] == "reference"
    assert times["half", "patched"][-1] == "yes"
    assert times["half", "stock"][2] == "RuntimeError: 'weight' must be 2-D while / tracing"
    assert times["all", "stock"][-1] == "NO: not 19 of 19 parameters"
    # What was not measured must not look held.
    assert bars(workload, rows)["compilations, half skipped: patched / stock"].held is None


def test_rows_that_raise_or_have_wrong_gradients_fail() -> None:
    workload, rows, _ = kept_run("stream-safety-2026-11-22")
    assert wrong(workload, rows) == []
    rows[0].error = "RuntimeError: lost"
    rows[1].found["gradient_error"] = float("nan")
    rows[2].found["gradient_error"] = 0.5
    where = workload.where(rows[0])
    assert wrong(workload, rows) == [
        f"Z1 stock, {where}: RuntimeError: lost",
        f"Z1 patched, {where}: gradients are off by nan",
        f"Z1 overlap stock, {where}: gradients are off by 0.5",
    ]


def test_retain_fails_where_stock_does_not() -> None:
    workload, rows, _ = kept_run("retain-2026-11-22")
    assert wrong(workload, rows) == []
    crash = find(rows, number=3)
    assert crash is not None
    crash.error = None
    assert wrong(workload, rows) == ["3 stock, K=2: not the known crash: it ran"]


def test_stock_may_fail_where_frames_are_skipped_and_nothing_else_may() -> None:
    workload, rows, _ = kept_run(DC)
    assert wrong(workload, rows) == []
    for row in rows:
        row.found["differences"] = [{"head.weight": {"gradient": 1.0}}]
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
    workload, rows, _ = kept_run(DC)
    row = find(rows, mode="patched", skipped="nothing")
    assert row is not None
    row.found["differences"] = [{"a": ROUNDING, "b": {"gradient": gradient}, "c": ROUNDING}]
    assert list(workload.wrong(row)) == ["has other gradients of b"]
    row.found["differences"] = [None]
    assert list(workload.wrong(row)) == ["not compared with eager ZeRO-3"]


@pytest.mark.parametrize(("skipped", "compiled"), [("nothing", 1), ("half", 2), ("all", 0)])
def test_dynamo_skips_what_the_row_says(skipped: str, compiled: int) -> None:
    made = model(skipped, layers=4, width=8, words=8, device=torch.device("cpu"))
    torch._dynamo.reset()
    made.compile(backend="eager")
    before = graphs()
    for _ in range(2):
        made(*torch.zeros(2, 1, 2, dtype=torch.long)).backward()
    assert graphs() - before == compiled


def test_differences_see_what_does_not_train_and_what_lacks_a_factor(tmp_path: Path) -> None:
    gradient, kept = torch.randn(9), tmp_path / "kept.pt"
    assert compiled.differences(dict.fromkeys("abc", gradient), kept) is None
    now = {"a": gradient, "b": torch.zeros(9), "c": gradient / 2}
    found = compiled.off_by(Row({}, found={"differences": [None, compiled.differences(now, kept)]}))
    assert found == {"a": 0, "b": 1, "c": pytest.approx(0.5)}
    with pytest.raises(RuntimeError, match="not the same parameters"):
        compiled.differences({"a": gradient}, kept)
