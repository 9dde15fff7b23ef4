"""What a benchmark is: its options, the rows it measures, and what is said of them.

A file for each says what is its own; what they share is here, and ``harness`` runs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from benchmarks import probes
from benchmarks.engines import applied
from benchmarks.options import kept
from benchmarks.probes import Forward
from benchmarks.provenance import p2p, sentence
from benchmarks.rows import Row, Run, groups, like, ratios
from benchmarks.tables import (
    Bar,
    Column,
    by_round,
    cell,
    markdown,
    mib,
    middle,
    number,
    off_by,
    phases,
)
from benchmarks.timing import Block, Step, ignore, time_block

STOCK, PATCHED = "stock", "patched"
# bf16 rounds to 4e-3; a lost or doubled gradient is off by its own size.
TOLERANCE = 2e-2
_CPU = torch.device("cpu")


class Standing(NamedTuple):
    """A row whose engine stands. `before`: MiB before the engine was built."""

    row: Row
    engine: Any
    step: Step
    data: Any
    before: float | None


class Workload:
    """One benchmark: with the options of a run, that is to come or that was kept."""

    name: str
    patches: Sequence[str]  # of the patched rows
    keys: tuple[str, ...]  # what a row is told by
    heads: tuple[str, str] = ("row", "mode")  # of `label`'s columns
    against = STOCK  # what the others are compared with
    full: Mapping[str, Any]  # options and their defaults, on CUDA
    smoke: Mapping[str, Any]  # on CPU
    named_by_words: tuple[str, ...] = ()  # options that are no numbers
    more: Sequence[Column] = ()  # what it looks at beside what all do
    own_processes = False  # a group of processes for each row in each round

    # What each says of itself.

    #: Rows that take turns on one engine.
    standing_together: Callable[[], Iterator[list[Row]]]
    #: What this rank trains on, in a row and those that stand with it.
    data: Callable[[Row], Any]
    engine: Callable[[Row], AbstractContextManager[Any]]
    #: Of a row with its engine and its data.
    step: Callable[[Row, Any, Any], Step]
    #: The backwards of one step in plain PyTorch, of a row and its data.
    plain: Callable[[Row, Any], Callable[[Forward], None]]
    label: Callable[[Row], tuple[str, str]]

    def __init__(self, options: argparse.Namespace, device: torch.device = _CPU) -> None:
        self.options = options
        self.device = device

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """Refuse what cannot run."""

    # What is measured.

    def rows(self, *values: Any, modes: Sequence[str]) -> list[Row]:
        """One for each mode, which is the last of what they are told by."""
        return [Row(dict(zip(self.keys, (*values, mode), strict=True))) for mode in modes]

    def is_patched(self, row: Row) -> bool:
        return bool(row["mode"] == PATCHED)

    def patched(self, row: Row) -> AbstractContextManager[None]:
        """DeepSpeed inside as `row` has it."""
        return applied(self.patches if self.is_patched(row) else ())

    def look(self, at: Standing) -> None:
        """Find out what no timed step can tell, in steps of their own."""
        for _ in range(self.options.warmup):
            at.step(ignore)
        plain, phase = self.plain(at.row, at.data), self.reduced_after(at.row)
        error = probes.gradient_error(at.step, at.engine, plain, phase, self.device)
        at.row.found["gradient_error"] = error
        at.row.found["peak_mib"] = probes.peak_mib(at.step, self.device, at.before)

    def time(self, at: Standing) -> Block:
        """One round."""
        return time_block(at.step, self.device, self.options.warmup, self.options.steps)

    def reduced_after(self, row: Row) -> str:
        """The phase at whose end the gradients of a step are."""
        return "backward"

    # What is said of it.

    def where(self, row: Row) -> str:
        """Of the rows that share a table."""
        return ""

    def named(self, row: Row) -> str:
        where = self.where(row)
        return " ".join(self.label(row)) + (f", {where}" if where else "")

    def reference(self, row: Row, rows: Sequence[Row]) -> Row | None:
        """What `row` is compared with; it may be itself."""
        return like(rows, row, mode=self.against)

    def columns(self, rows: Sequence[Row]) -> list[Column]:
        return [
            *self.times(rows),
            ("ms per phase", lambda row: phases(row.ms_by_phase)),
            *self.more,
            ("peak MiB", mib("peak_mib")),
            ("gradient error", lambda row: off_by(row.get("gradient_error"))),
        ]

    def bars(self, rows: Sequence[Row], p2p: bool) -> Iterator[Bar]:
        """`p2p`: whether the GPUs copy directly between each other."""
        yield from ()

    def may_fail(self, row: Row) -> bool:
        """Whether the error of `row` is one that stock is known for."""
        return False

    def wrong(self, row: Row) -> Iterator[str]:
        """What it did that it should not have done."""
        if row.error is not None:
            if not self.may_fail(row):
                yield row.error
            return
        error = row.get("gradient_error")
        if error is None or not error <= TOLERANCE:  # nor NaN
            yield f"gradients are off by {error}"

    # What all of them say alike.

    def read(self, run: Run) -> list[Row]:
        return [Row.read(row, self.keys) for row in run["rows"]]

    def ratios(self, row: Row, rows: Sequence[Row]) -> list[float]:
        """To the reference; none of the reference itself."""
        base = self.reference(row, rows)
        return [] if base is row else ratios(row, base)

    def times(self, rows: Sequence[Row]) -> list[Column]:
        """Milliseconds of what the others are compared with, as a scale; of the others, ratios."""

        def ms(row: Row) -> str:
            if row.error:
                return cell(row.error)
            alone = self.reference(row, rows) in (None, row)
            return number(row.median if alone else None, 2)

        return [
            (f"{self.against}'s ms per step", ms),
            (f"/ {self.against}", lambda row: middle(self.ratios(row, rows))),
            ("by round", lambda row: by_round(self.ratios(row, rows))),
        ]

    def section(self, run: Run) -> str:
        """A run, as it is kept, in Markdown."""
        rows, origin = self.read(run), run.get("provenance", {})
        sizes = ", ".join(f"{name} {value}" for name, value in kept(self.options).items())
        parts = [f"{sentence(origin)} {sizes}."]
        for where, group in groups(rows, self.where):
            names, cells = zip(*self.columns(rows), strict=True)
            body = [(*self.label(row), *(show(row) for show in cells)) for row in group]
            parts.append(markdown((where or self.heads[0], self.heads[1], *names), body))
        if bars := [bar.cells() for bar in self.bars(rows, p2p(origin))]:
            parts.append(markdown(("ratio or count", "measured", "bar", "held"), bars))
        return "\n\n".join(parts)
