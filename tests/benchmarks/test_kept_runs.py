"""The runs in docs/ are read as they were meant, and the pages say what they have."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

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


def medians(name: str, **of: object) -> Iterator[float]:
    """The ratios to the reference of the rows that are so."""
    workload, rows, _ = kept_run(name)
    for row in rows:
        if row.of.items() >= of.items() and (found := workload.ratios(row, rows)):
            yield statistics.median(found)


def span(*found: float) -> str:
    return " to ".join(dict.fromkeys(f"{end:.2f}" for end in (min(found), max(found))))


SAFE = "stream-safety"
PATCHED = {"mode": "patched", "overlap": True}


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("the same, ZeRO 3 | **", span(*medians("at-rest-2026-11-22", stage=3, mode="patched"))),
        ("over an ordinary step | **", span(*medians("retain-2026-11-22", number=4))),
        ("stock crashes, two forwards take ", span(*medians("retain-2026-11-22", number=8))),
        (
            "over eager ZeRO-3 | **",
            span(*medians("dc-fallback-2026-11-21", skipped="half", mode="patched")),
        ),
        (
            "no P2P | **",
            span(
                *medians(f"{SAFE}-no-p2p-2026-11-22", **PATCHED),
                *medians(f"{SAFE}-no-p2p-micro-steps-2026-11-22", **PATCHED),
            ),
        ),
        (
            "256 rows | **0.92 to 1.03**; ",
            span(
                *medians(f"{SAFE}-2026-11-22", batch=256, **PATCHED),
                *medians(f"{SAFE}-large-bucket-2026-11-22", batch=256, **PATCHED),
            ),
        ),
    ],
)
def test_a_result_is_what_was_recorded(row: str, found: str) -> None:
    assert f"{row}{found}" in (DOCS / "benchmarks.md").read_text(encoding="utf-8")


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
