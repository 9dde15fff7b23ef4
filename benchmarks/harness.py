"""Run a benchmark: parse, measure its rows in turn, keep them after each piece, show, judge.

Under torchrun all rows run in its processes. A benchmark whose rows need processes of their own is
started without, and starts torchrun for each (``launch``), which brings it back here.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import probes
from benchmarks.engines import free
from benchmarks.launch import Launcher
from benchmarks.options import kept, parsed, write
from benchmarks.provenance import p2p, provenance
from benchmarks.ranks import join, leave, say
from benchmarks.rows import Row
from benchmarks.workload import Standing, Workload


def main(kind: type[Workload]) -> int:
    """Run what the command line asks for; 0 if every row did what it should."""
    parser = argparse.ArgumentParser(f"benchmarks.{kind.name}", description=kind.__doc__)
    options = parsed(parser, kind)
    if "LOCAL_RANK" in os.environ:
        return _under_torchrun(kind, options)
    if not kind.own_processes:
        parser.error(f"start it with torchrun --nproc-per-node 2 -m {parser.prog}")
    return _with_processes_of_their_own(kind(options))


def _under_torchrun(kind: type[Workload], options: argparse.Namespace) -> int:
    device = join(options.device)
    book = Book(kind(options, device), provenance(device, options.commit))
    say(", ".join(f"{key} {value}" for key, value in book.provenance.items()))
    for group in book.workload.standing_together():
        book.rows += group
        _attempt(book, group)
    if kind.own_processes:  # judged by the one that started it
        # A group that broke off in the middle need not come down in order.
        return 1 if any(row.error for row in book.rows) else leave(())
    book.show()
    return leave(book.failures())


def _with_processes_of_their_own(workload: Workload) -> int:
    """A B C, C B A, A B C ...: drift of the machine meets all alike. What failed is over."""
    book = Book(workload, {})
    book.rows += [row for group in workload.standing_together() for row in group]
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(workload, Path(folder))
        turn = list(book.rows)
        for number in range(workload.options.rounds):
            for row in turn:
                if row.error is None:
                    run = launcher.run(row, is_first=number == 0)
                    book.provenance = book.provenance or run.get("provenance", {})
                    book.keep([row])
            turn.reverse()
    book.show()
    return leave(book.failures())


class Book:
    """A run so far, on rank 0: where it is from, and its rows."""

    def __init__(self, workload: Workload, provenance: dict[str, str]) -> None:
        self.workload = workload
        self.provenance = provenance
        self.rows: list[Row] = []

    def keep(self, news: Sequence[Row]) -> None:
        """After every piece of work: what was measured stays, whatever comes next."""
        for row in news:
            done = "not timed" if row.median is None else f"{row.median:.2f} ms"
            say(f"{self.workload.named(row)}: {row.error or done}")
        if not dist.is_initialized() or dist.get_rank() == 0:
            write(self.workload.options.json, self._document())

    def show(self) -> None:
        say("", self.workload.section(self._document()), "")
        if self.workload.options.device == "cpu":
            say("On CPU these times mean nothing; on GPUs the bars do.")

    def failures(self) -> Iterator[str]:
        for row in self.rows:
            for words in self.workload.wrong(row):
                yield f"{self.workload.named(row)}: {words}"

    def _document(self) -> dict[str, Any]:
        bars = self.workload.bars(self.rows, p2p(self.provenance))
        return {
            "provenance": self.provenance,
            "options": kept(self.workload.options),
            "bars": [bar.plain() for bar in bars],
            "rows": [row.plain() for row in self.rows],
        }


def _attempt(book: Book, rows: Sequence[Row]) -> None:
    """Do one piece of work; its exception becomes a result, and the next piece begins anew."""
    try:
        book.workload.prepare(rows)
        _measure(book.workload, [row for row in rows if row.error is None])
    except Exception as error:
        traceback.print_exc()
        for row in rows:
            row.fail(error)
    free(book.workload.device)
    if not book.workload.own_processes:
        dist.barrier()
    book.keep(rows)


def _measure(workload: Workload, rows: Sequence[Row]) -> None:
    """A block of each row per round: A B C, C B A, A B C ...; drift meets all of them alike."""
    if not rows:
        return
    with ExitStack() as around:
        if workload.own_processes:
            around.enter_context(workload.patched(rows[0]))
        stood = list(_stand(workload, rows, around))
        turns = list(stood)
        for _ in range(1 if workload.own_processes else workload.options.rounds):
            for at in turns:
                with workload.patched(at.row):
                    at.row.take(workload.time(at))
            turns.reverse()
        workload.end(stood)


def _stand(workload: Workload, rows: Sequence[Row], around: ExitStack) -> Iterator[Standing]:
    """Those that could be built and looked at. All engines stand at once."""
    data = workload.data(rows[0])
    before = probes.allocated_mib(workload.device)
    if workload.shares_engine:
        engine = around.enter_context(workload.engine(rows[0]))
    for row in rows:
        with recorded(workload, row), workload.patched(row):
            if not workload.shares_engine:
                before = probes.allocated_mib(workload.device)
                engine = around.enter_context(workload.engine(row))
            at = Standing(row, engine, workload.step(row, engine, data), data, before)
            workload.look(at)
        if row.error is None:
            yield at


@contextmanager
def recorded(workload: Workload, row: Row) -> Iterator[None]:
    """An exception is this row's, and the others go on."""
    try:
        yield
    except Exception as error:
        row.fail(error)
        if not workload.may_fail(row):
            traceback.print_exc()
