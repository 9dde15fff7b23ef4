"""Start a row under torchrun and wait for its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.dc_fallback.results import Measured
from benchmarks.dc_fallback.rows import may_fail

_TORCHRUN = "torch/distributed/elastic/multiprocessing/api.py"
_ROOT = Path(__file__).resolve().parents[2]
# DeepSpeed's builder asks the GPU what it is where the first is not set, and cannot read all that
# torch can where it is. The others would change what is measured.
_LEFT_OUT = ("TORCH_CUDA_ARCH_LIST", "DS_PATCHES")


class Launcher(NamedTuple):
    """words: options of benchmarks.dc_fallback.row that every row has."""

    ranks: int
    words: Sequence[str]
    folder: Path  # for what the rows leave behind
    seconds: int  # that a row may take

    def run(self, mode: str, skipped: str, number: int) -> Measured:
        """A row that leaves nothing behind is one that failed."""
        name = f"{mode}-{skipped}-{number}"
        kept, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc-per-node", str(self.ranks), "-m", "benchmarks.dc_fallback.row"]
        words += ["--mode", mode, "--skipped", skipped, "--json", str(kept), *self.words]
        if number == 0:
            words += ["--reference", str(self.folder / "reference.pt")]
        with log.open("w") as output:
            end = _wait(words, output.fileno(), self.seconds)
        measured = _read(kept, Measured(mode, skipped))
        if end and measured.error is None:
            measured.error = f"{end}: {_last_error(log)}"
        if measured.error is not None and not may_fail(mode, skipped):
            _show(log)
        return measured


def _wait(words: Sequence[str], output: int, seconds: int) -> str:
    """How it ended; nothing if well."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_LEFT_OUT)}
    process = subprocess.Popen(words, cwd=_ROOT, env=clean, stdout=output, stderr=subprocess.STDOUT)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds} s"
    finally:
        _end(process)
    return f"exit code {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Of one that has not ended by itself; torchrun takes its ranks along."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read(kept: Path, nothing: Measured) -> Measured:
    return Measured.read(json.loads(kept.read_text())) if kept.exists() else nothing


def _last_error(log: Path) -> str:
    """The last line that names an exception of a rank."""
    named = [line for line in _of_ranks(log) if "Error: " in line]
    return named[-1].strip() if named else "no exception was printed"


def _show(log: Path, lines: int = 40) -> None:
    """What a failed row said last, on the standard error."""
    print(*_of_ranks(log)[-lines:], sep="\n", file=sys.stderr, flush=True)


def _of_ranks(log: Path) -> list[str]:
    """What the ranks printed, without what torchrun says of their end."""
    lines = log.read_text(errors="replace").splitlines()
    ends = (number for number, line in enumerate(lines) if _TORCHRUN in line)
    return lines[: next(ends, len(lines))]
