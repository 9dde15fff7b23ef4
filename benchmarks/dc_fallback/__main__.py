"""dc_fallback, measured: ``python -m benchmarks.dc_fallback [options]``, without torchrun.

Each row runs in processes of its own, which this one starts, one row after another. Prints Markdown
and, with ``--json``, keeps everything behind it. Without CUDA, where DeepCompile does not run, it
runs a small version of eager ZeRO-3 on gloo, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.dc_fallback import table
from benchmarks.dc_fallback.bars import bars
from benchmarks.dc_fallback.launch import Launcher
from benchmarks.dc_fallback.results import Measured, Row, failures
from benchmarks.dc_fallback.rows import EAGER, MODES, SIZES, SKIPPED
from benchmarks.options import common, filled, kept, positive, write
from benchmarks.tables import cell

_FULL = {
    "ranks": 2,
    "layers": 8,
    "width": 2048,
    "words": 4096,
    "batch": 4,
    "tokens": 512,
    "warmup": 10,  # DeepCompile compiles at steps 0 and 5
    "steps": 40,
    "rounds": 3,
}
_SMOKE = {
    "ranks": 2,
    "layers": 2,
    "width": 32,
    "words": 64,
    "batch": 2,
    "tokens": 8,
    "warmup": 3,
    "steps": 2,
    "rounds": 1,
}


def main() -> int:
    """Run what the command line asks for; 0 if every row did what it should."""
    options = _parse()
    # In an order of ours: whatever is compared with eager has to come after it.
    rows = [
        Row(mode, skipped)
        for skipped in SKIPPED
        for mode in MODES
        if skipped in options.skipped and mode in options.modes
    ]
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(options, rows, Path(folder))
        run.rounds()
    print("", table.section(run.document()), "", sep="\n", flush=True)
    if options.device == "cpu":
        print("On CPU these times mean nothing; on GPUs the bars do.")
    wrong = list(failures(rows))
    for failure in wrong:
        print(f"FAILED: {failure}", flush=True)
    return 1 if wrong else 0


class _Run:
    """The rows in turn, and what came of them."""

    def __init__(self, options: argparse.Namespace, rows: Sequence[Row], folder: Path) -> None:
        self._options = options
        self._rows = rows
        self._launcher = Launcher(options.ranks, _words(options), folder, options.seconds)

    def rounds(self) -> None:
        """A B C, C B A, A B C ...: drift of the machine meets all alike. What failed is over."""
        turn = list(self._rows)
        for number in range(self._options.rounds):
            for row in turn:
                if row.error is None:
                    self._once(row, number)
            turn.reverse()

    def document(self) -> dict[str, object]:
        origins = (one.provenance for row in self._rows for one in row.rounds if one.provenance)
        return {
            "provenance": next(origins, {}),
            "options": kept(self._options),
            "bars": [bar.plain() for bar in bars(self._rows)],
            "rows": [row.plain() for row in self._rows],
        }

    def _once(self, row: Row, number: int) -> None:
        begin = time.monotonic()
        one = self._launcher.run(row.mode, row.skipped, number)
        row.rounds.append(one)
        took = time.monotonic() - begin
        print(f"round {number + 1}, {row}: {_said(one)} ({took:.0f} s)", flush=True)
        # After every process: what was measured stays, whatever comes next.
        write(self._options.json, self.document())


def _said(one: Measured) -> str:
    if one.error is not None:
        return cell(one.error)
    peak = f", peak {one.peak.whole:.0f} MiB" if one.peak else ""
    return f"{statistics.median(one.ms):.2f} ms{peak}"


def _words(options: argparse.Namespace) -> list[str]:
    """The options of a row's process."""
    values = {name: getattr(options, name) for name in (*SIZES, "device", "warmup", "steps")}
    values["commit"] = options.commit
    return [
        word
        for name, value in values.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.dc_fallback", description=__doc__)
    common(parser, _FULL, _SMOKE)
    parser.add_argument("--modes", choices=MODES, nargs="+", help="all on CUDA, eager on CPU")
    parser.add_argument("--skipped", choices=SKIPPED, nargs="+", default=list(SKIPPED))
    parser.add_argument("--reduce-bucket-size", type=positive, help="elements")
    parser.add_argument("--seconds", type=positive, default=300, help="that a row may take")
    options = filled(parser.parse_args(), _FULL, _SMOKE)
    if options.modes is None:
        options.modes = [EAGER] if options.device == "cpu" else list(MODES)
    if options.device == "cpu" and options.modes != [EAGER]:
        parser.error(f"DeepCompile needs CUDA; on CPU there is --modes {EAGER}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
