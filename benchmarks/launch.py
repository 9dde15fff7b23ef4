"""Start a row under torchrun and wait for its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.options import kept, words
from benchmarks.rows import Row
from benchmarks.workload import Workload

_TORCHRUN = "torch/distributed/elastic/multiprocessing/api.py"
_ROOT = Path(__file__).resolve().parents[1]
# DeepSpeed's builder asks the GPU what it is where the first is not set, and cannot read all that
# torch can where it is. The others would change what is measured.
_LEFT_OUT = ("TORCH_CUDA_ARCH_LIST", "DS_PATCHES")


class Launcher(NamedTuple):
    """folder: for what the rows leave behind."""

    workload: Workload
    folder: Path

    def run(self, row: Row, is_first: bool) -> dict[str, Any]:
        """One round of `row`, which takes what came of it; the run that the processes kept.

        is_first: of its rounds. A row that leaves nothing behind is one that failed.
        """
        options = self.workload.options
        path, log = self.folder / "row.json", self.folder / "row.log"
        path.unlink(missing_ok=True)
        chosen = self.workload.chosen(row) | {"rounds": 1, "json": path, "commit": options.commit}
        if is_first:
            chosen["reference"] = self.folder / "reference.pt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [
            "--nproc-per-node",
            str(options.ranks),
            "-m",
            f"benchmarks.{self.workload.name}",
        ]
        with log.open("w") as output:
            end = _wait(
                [*command, *words(kept(options) | chosen)], output.fileno(), options.seconds
            )
        run: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        for one in run.get("rows", ()):
            row.add(one)
        if end and row.error is None:
            row.error = f"{end}: {_last_error(log)}"
        if row.error is not None and not self.workload.may_fail(row):
            print(*_of_ranks(log)[-40:], sep="\n", file=sys.stderr, flush=True)
        return run


def _wait(command: Sequence[str], output: int, seconds: int) -> str:
    """How it ended; nothing if well."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_LEFT_OUT)}
    process = subprocess.Popen(
        command, cwd=_ROOT, env=clean, stdout=output, stderr=subprocess.STDOUT
    )
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


def _last_error(log: Path) -> str:
    """The last line that names an exception of a rank."""
    named = [line for line in _of_ranks(log) if "Error: " in line]
    return named[-1].strip() if named else "no exception was printed"


def _of_ranks(log: Path) -> list[str]:
    """What the ranks printed, without what torchrun says of their end."""
    lines = log.read_text(errors="replace").splitlines()
    ends = (number for number, line in enumerate(lines) if _TORCHRUN in line)
    return lines[: next(ends, len(lines))]
