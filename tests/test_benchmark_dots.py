"""The page's results are what its runs have, and the picture has every round."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dots

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "benchmarks.md").read_text(encoding="utf-8")


def medians(read: Callable[[Any], Any], run: str, among: str = "") -> list[float]:
    """The ratios of a run's lines, of those that have these words."""
    lines = read(json.loads((DOCS / f"{run}.json").read_text(encoding="utf-8")))
    return [statistics.median(line.ratios) for line in lines if among in line.name]


def span(found: list[float]) -> str:
    ends = dict.fromkeys(f"{end:.2f}" for end in (min(found), max(found)))
    return " to ".join(ends)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("the same, ZeRO 3 | **", medians(dots.at_rest, "at-rest-2026-11-22", "ZeRO 3")),
        ("over an ordinary step | **", medians(dots.retain, "retain-2026-11-22", "patched")),
        ("stock crashes, two forwards take ", medians(dots.retain, "retain-2026-11-22", "stock")),
        (
            "over eager ZeRO-3 | **",
            medians(dots.dc_fallback, "dc-fallback-2026-11-21", "half skipped"),
        ),
        (
            "no P2P | **",
            medians(dots.stream_safety, "stream-safety-no-p2p-2026-11-22")
            + medians(dots.stream_safety, "stream-safety-no-p2p-micro-steps-2026-11-22"),
        ),
        (
            "256 rows | **0.92 to 1.03**; ",
            medians(dots.stream_safety, "stream-safety-2026-11-22", " 256 rows")
            + medians(dots.stream_safety, "stream-safety-large-bucket-2026-11-22", " 256 rows"),
        ),
    ],
)
def test_a_result_is_what_was_recorded(row: str, found: list[float]) -> None:
    assert f"{row}{span(found)}" in PAGE


def test_the_picture_has_a_dot_for_each_round(tmp_path: Path) -> None:
    lines = [dots.Series("some step", (0.9, 1.0, 1.3), (1.0,)), dots.Series("another", (0.5,))]
    dots.draw({"Some title": lines}, tmp_path / "dots.svg")
    drawn = (tmp_path / "dots.svg").read_text(encoding="utf-8")
    for text in ("Some title", "some step", "another", "1.00", "0.50"):
        assert f">{text}<" in drawn
    assert drawn.count("<use ") >= 5
