"""Run a benchmark: parse, measure its rows in turn, keep them after each piece, show, judge.

Under torchrun all rows run in its processes. A benchmark whose rows need processes of their own is
started without, and starts torchrun for each row in each round, which brings it back here.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import probes
from benchmarks.engines import free
from benchmarks.options import kept, parsed, words, write
from benchmarks.provenance import ROOT, p2p, provenance
from benchmarks.rows import Row
from benchmarks.workload import Standing, Workload

# A rank that waits longer has lost the others: end with a message, not at a job's time limit.
_PATIENCE = timedelta(minutes=2)
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
    device = _join(options.device)
    book = Book(kind(options, device), provenance(device, options.commit))
    _say(", ".join(f"{key} {value}" for key, value in book.provenance.items()))
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
    code = 0 if kind.own_processes else book.end()
    dist.destroy_process_group()
    return code


def _join(kind: str) -> torch.device:
    """Bring the process group up; `kind`: cuda or cpu. Nothing of DeepSpeed is compiled."""
    if kind == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops

    # On CPU it would build a shared-memory all-reduce with g++; this table is its own switch.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    upstream = logging.getLogger("DeepSpeed")
    upstream.setLevel(logging.WARNING)
    # Said of torch's own optimizers, by every engine.
    upstream.addFilter(lambda record: "untested optimizer" not in record.getMessage())
    # The patch comes and goes with every block: what applying has to note is no news here.
    logging.getLogger("ds_patches").addFilter(lambda record: record.levelno > logging.WARNING)
    # DeepSpeed calls collectives by names that newer torch deprecates, with a warning per call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    deepspeed.init_distributed("gloo" if kind == "cpu" else "nccl", timeout=_PATIENCE)
    return device


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
    return book.end()


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
            command, cwd=ROOT, env=clean, stdout=output, stderr=subprocess.STDOUT
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
            _say(f"{self.workload.named(row)}: {row.error or done}")
        if _is_first():
            write(self.workload.options.json, self._document())

    def end(self) -> int:
        """Show it, and what failed; the exit status."""
        _say("", self.workload.section(self._document()), "")
        if self.workload.options.device == "cpu":
            _say("On CPU these times mean nothing; on GPUs the bars do.")
        failures = [(row, wrong) for row in self.rows for wrong in self.workload.wrong(row)]
        for row, wrong in failures:
            _say(f"FAILED: {self.workload.named(row)}: {wrong}")
        return int(bool(failures))

    def _document(self) -> dict[str, Any]:
        bars = self.workload.bars(self.rows, p2p(self.provenance))
        return {
            "provenance": self.provenance,
            "options": kept(self.workload.options),
            "bars": [bar.plain() for bar in bars],
            "rows": [row.plain() for row in self.rows],
        }


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _say(*lines: str) -> None:
    """Print on one rank."""
    if _is_first():
        print(*lines, sep="\n", flush=True)
