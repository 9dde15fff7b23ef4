"""The runs in docs/ are read as they were meant, and the pages say what they have."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from benchmarks import picture, show
from benchmarks.provenance import p2p
from benchmarks.rows import Run, like
from benchmarks.stream_safety import StreamSafety, shares_of
from benchmarks.tables import middle, number
from benchmarks.workload import Series, Workload
from tests.benchmarks.outcome import ROOT

DOCS = ROOT / "docs"
KIND = {kind.name.replace("_", "-"): kind for kind in show.KINDS}
KEPT = sorted(DOCS.glob("*-20??-??-??.json"))


def kind_of(path: Path) -> type[Workload]:
    return next(kind for name, kind in KIND.items() if path.name.startswith(name))


def named(name: str) -> tuple[type[Workload], Run]:
    path = DOCS / f"{name}.json"
    return kind_of(path), show.load(path)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_kept_run_has_the_bars_it_had(path: Path) -> None:
    run = show.load(path)
    workload = show.of(kind_of(path), run)
    rows = workload.read(run)
    assert len(rows) == len(run["rows"]) * (3 if workload.name == "at_rest" else 1)
    bars = [bar.plain() for bar in workload.bars(rows, p2p(run.get("provenance", {})))]
    assert bars == run.get("bars", [])
    text = workload.section(run)
    for row in rows:
        assert f"| {' | '.join(workload.label(row))} |" in text


def medians(run: str, among: str = "") -> list[float]:
    """The ratios of a run's lines in a picture, of those that have these words."""
    kind, kept = named(run)
    return [statistics.median(one.ratios) for one in show.lines(kind, [kept]) if among in one.name]


def span(found: list[float]) -> str:
    return " to ".join(dict.fromkeys(f"{end:.2f}" for end in (min(found), max(found))))


SAFE = "stream-safety"


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("the same, ZeRO 3 | **", medians("at-rest-2026-11-22", "ZeRO 3")),
        ("over an ordinary step | **", medians("retain-2026-11-22", "patched")),
        ("stock crashes, two forwards take ", medians("retain-2026-11-22", "stock")),
        ("over eager ZeRO-3 | **", medians("dc-fallback-2026-11-21", "half skipped, patched")),
        (
            "no P2P | **",
            medians(f"{SAFE}-no-p2p-2026-11-22") + medians(f"{SAFE}-no-p2p-micro-steps-2026-11-22"),
        ),
        (
            "256 rows | **0.92 to 1.03**; ",
            medians(f"{SAFE}-2026-11-22", " 256 rows")
            + medians(f"{SAFE}-large-bucket-2026-11-22", " 256 rows"),
        ),
    ],
)
def test_a_result_is_what_was_recorded(row: str, found: list[float]) -> None:
    assert f"{row}{span(found)}" in (DOCS / "benchmarks.md").read_text(encoding="utf-8")


def test_the_picture_has_a_dot_for_each_round_and_says_what_has_none(tmp_path: Path) -> None:
    lines = [
        Series("some step", (0.9, 1.0, 1.3), again=(1.0,)),
        Series("another", (0.5,), patched=False),
        Series("a third", (), note="does not train"),
    ]
    picture.draw({"Some title": lines, "An empty one": []}, tmp_path / "dots.svg")
    drawn = (tmp_path / "dots.svg").read_text(encoding="utf-8")
    for text in ("Some title", "some step", "another", "1.00", "0.50", "does not train"):
        assert f">{text}<" in drawn
    assert "An empty one" not in drawn
    assert drawn.count("<use ") >= 5
    with pytest.raises(ValueError, match="no row was compared"):
        picture.draw({"An empty one": []}, tmp_path / "empty.svg")


@pytest.mark.parametrize("name", ["coalesce", "dc-fallback", "stream-safety"])
def test_a_pages_picture_is_of_its_runs(name: str) -> None:
    drawn = (DOCS / f"{name}.svg").read_text(encoding="utf-8")
    page = (DOCS / f"benchmarks-{name}.md").read_text(encoding="utf-8")
    command = re.search(rf"benchmarks\.show --picture \S*{name}\.svg --{name} (.*)", page)
    assert command is not None
    runs = [show.load(ROOT / path) for path in command[1].split()]
    for line in show.lines(KIND[name], runs):
        assert f">{line.name}<" in drawn


def test_the_table_of_stream_safety_is_of_its_runs() -> None:
    page = (DOCS / "benchmarks-stream-safety.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (?:on|off) \| \d+ \| .*", page.partition("###")[0], re.MULTILINE)
    expected = []
    for path in sorted(DOCS.glob("stream-safety-*.json")):
        run = show.load(path)
        workload = show.of(StreamSafety, run)
        rows = workload.read(run)
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
            cells += [number(shares_of(one).exposed, 1) for one in (stock, row)]
            cells += [number(one.get("peak_mib"), 0) for one in (stock, row)]
            expected.append(f"| {' | '.join(cells)} |")
    assert sorted(shown) == sorted(expected)
