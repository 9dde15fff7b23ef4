"""The runs in docs/ are read as they were meant, and the pages say what they have."""

from __future__ import annotations

import re
import statistics

import pytest

from benchmarks import show
from benchmarks.provenance import p2p
from benchmarks.rows import Row, Run, like
from benchmarks.tables import middle, number
from benchmarks.workload import Workload
from tests.benchmarks import ROOT

DOCS = ROOT / "docs"
KEPT = sorted(DOCS.glob("*-20??-??-??.json"))


def kept_run(name: str) -> tuple[Workload, list[Row], Run]:
    """A run in docs/, by the name of its file."""
    kinds = {kind.name.replace("_", "-"): kind for kind in show.KINDS}
    kind = next(kind for prefix, kind in kinds.items() if name.startswith(prefix))
    workload, run = show.load(kind, DOCS / f"{name}.json")
    return workload, workload.read(run), run


@pytest.mark.parametrize("name", [path.stem for path in KEPT])
def test_a_kept_run_has_the_bars_it_had(name: str) -> None:
    """Of those that are still asked for."""
    workload, rows, run = kept_run(name)
    bars = [bar.plain() for bar in workload.bars(rows, p2p(run.get("provenance", {})))]
    names = {bar["name"] for bar in bars}
    assert bars == [bar for bar in run.get("bars", []) if bar["name"] in names]
    text = workload.section(run)
    for row in rows:
        assert f"| {' | '.join(workload.label(row))} |" in text


DAY = "2026-11-22"
RETAIN, SAFE = f"retain-{DAY}", "stream-safety"
ALL_PARTS = {"mode": "patched", "overlap": True}
HALF = {"skipped": "half", "mode": "patched"}
#: What stands before a result in docs/benchmarks.md: of which rows, and of which runs.
RESULTS = {
    "the same, ZeRO 3 | **": ({"stage": 3, "mode": "patched"}, [f"at-rest-{DAY}"]),
    "over an ordinary step | **": ({"number": 4}, [RETAIN]),
    "stock crashes, two forwards take ": ({"number": 8}, [RETAIN]),
    "over eager ZeRO-3 | **": (HALF, ["dc-fallback-2026-11-21"]),
    "no P2P | **": (
        ALL_PARTS,
        [f"{SAFE}-no-p2p{kind}-2026-11-22" for kind in ("", "-micro-steps")],
    ),
    "256 rows | **0.92 to 1.03**; ": (
        {"batch": 256, **ALL_PARTS},
        [f"{SAFE}{kind}-2026-11-22" for kind in ("", "-large-bucket")],
    ),
}


@pytest.mark.parametrize("before", RESULTS)
def test_a_result_is_what_was_recorded(before: str) -> None:
    """The least and the greatest median of the ratios to the reference."""
    of, runs = RESULTS[before]
    medians = [
        statistics.median(found)
        for workload, rows, _ in map(kept_run, runs)
        for row in rows
        if row.of.items() >= of.items() and (found := workload.ratios(row, rows))
    ]
    ends = dict.fromkeys(f"{end:.2f}" for end in (min(medians), max(medians)))
    assert f"{before}{' to '.join(ends)}" in (DOCS / "benchmarks.md").read_text(encoding="utf-8")


def test_the_table_of_stream_safety_is_of_its_runs() -> None:
    page = (DOCS / "benchmarks-stream-safety.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (?:on|off) \| \d+ \| .*", page.partition("###")[0], re.MULTILINE)
    expected = []
    for path in KEPT:
        if not path.name.startswith(SAFE):
            continue
        workload, rows, run = kept_run(path.stem)
        for row in rows:
            if (row["stage"], row["overlap"], row["mode"]) != (2, True, "patched"):
                continue
            stock, first = like(rows, row, mode="stock"), like(rows, row, stage=1)
            off = like(rows, row, mode="stock", overlap=False)
            assert None not in (first, stock, off)
            cells = ["on" if p2p(run["provenance"]) else "off", str(row["batch"])]
            cells += [f"{row['reduce_bucket_size'] / 1e6:.0f}M", str(row["micro_steps"])]
            cells += [number(one.median, 1) for one in (off, stock)]
            cells += [middle(workload.ratios(one, rows)) for one in (first, row)]
            cells += [number(one.get("peak_mib"), 0) for one in (stock, row)]
            expected.append(f"| {' | '.join(cells)} |")
    assert sorted(shown) == sorted(expected)
