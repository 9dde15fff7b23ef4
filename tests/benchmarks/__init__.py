"""Benchmarks on CPU, and what is said of rows that a machine with GPUs measured."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def table(printed: str, first_header: str) -> list[list[str]]:
    """The cells of the first Markdown table that has this first column."""
    _, _, body = printed.partition(f"| {first_header} |")
    rows = body.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
