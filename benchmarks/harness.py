"""Run a benchmark: parse, measure its rows in turn, keep them after each piece, show, judge.

Under torchrun all rows run in its processes. A benchmark whose rows need processes of their own is
started without, and starts torchrun for each row in each round, which brings it back here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import probes
from benchmarks.engines import free
from benchmarks.options import kept, parsed, words, write
from benchmarks.provenance import p2p, provenance
from benchmarks.ranks import join, leave, say
from benchmarks.rows import Row
from benchmarks.workload import Standing, Workload

_ROOT = Path(__file__).resolve().parents[1]
# DeepSpeed's builder asks the GPU what it is where the first is not set, and cannot read all that
# torch can where it is. The others would change what is measured.
_LEFT_OUT = ("TORCH_CUDA_ARCH_LIST", "DS_PATCHES")


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
        try:
            _measure(book.workload, group)
        except Exception as error:
            if kind.own_processes:  # whoever started it reads what was printed
                raise
            for row in group:
                row.error = f"{type(error).__name__}: {error}"
            if not all(map(book.workload.may_fail, group)):
                traceback.print_exc()
        free(device)
        dist.barrier()
        book.keep(group)
    return leave(() if kind.own_processes else book.end())


def _measure(workload: Workload, rows: Sequence[Row]) -> None:
    """A block of each row per round: A B C, C B A, A B C ...; drift meets all of them alike."""
    data, before = workload.data(rows[0]), probes.allocated_mib(workload.device)
    with workload.engine(rows[0]) as engine:
        stood = [
            Standing(row, engine, workload.step(row, engine, data), data, before) for row in rows
        ]
        for at in stood:
            with workload.patched(at.row):
                workload.look(at)
        for _ in range(workload.options.rounds):
            for at in stood:
                with workload.patched(at.row):
                    at.row.take(workload.time(at))
            stood.reverse()


def _with_processes_of_their_own(workload: Workload) -> int:
    """The same order. What failed is over."""
    book = Book(workload, {})
    book.rows += [row for group in workload.standing_together() for row in group]
    turn = list(book.rows)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(workload.options.rounds):
            for row in turn:
                if row.error is None:
                    run = _in_processes(workload, row, Path(folder))
                    book.provenance = book.provenance or run.get("provenance", {})
                    book.keep([row])
            turn.reverse()
    return leave(book.end())


def _in_processes(workload: Workload, row: Row, folder: Path) -> dict[str, Any]:
    """One round of `row`, which takes what came of it; the run that the processes kept."""
    options, path, log = workload.options, folder / "row.json", folder / "row.log"
    path.unlink(missing_ok=True)
    own = {"rounds": 1, "json": path, "commit": options.commit, "reference": folder / "kept.pt"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(options.ranks), "-m", f"benchmarks.{workload.name}"]
    command += words(kept(options) | workload.chosen(row) | own)
    row.error = _run(command, log, options.seconds)
    if row.error is not None and not workload.may_fail(row):
        print(*log.read_text(errors="replace").splitlines()[-40:], sep="\n", file=sys.stderr)
    run: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for one in run.get("rows", ()):
        row.add(one)
    return run


def _run(command: Sequence[str], log: Path, seconds: int) -> str | None:
    """What went wrong."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_LEFT_OUT)}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=_ROOT, env=clean, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds} s"
    finally:
        process.terminate()  # torchrun takes its ranks along
        process.wait()
    raised = [line for line in log.read_text(errors="replace").split("\n") if "Error: " in line]
    # What torchrun says of its end names no reason.
    named = [line.strip() for line in raised if "ChildFailedError" not in line]
    return f"exit code {code}: {(named or ['no exception was printed'])[-1]}" if code else None


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

    def end(self) -> Iterator[str]:
        """Show it; what failed."""
        say("", self.workload.section(self._document()), "")
        if self.workload.options.device == "cpu":
            say("On CPU these times mean nothing; on GPUs the bars do.")
        for row in self.rows:
            for wrong in self.workload.wrong(row):
                yield f"{self.workload.named(row)}: {wrong}"

    def _document(self) -> dict[str, Any]:
        bars = self.workload.bars(self.rows, p2p(self.provenance))
        return {
            "provenance": self.provenance,
            "options": kept(self.workload.options),
            "bars": [bar.plain() for bar in bars],
            "rows": [row.plain() for row in self.rows],
        }
