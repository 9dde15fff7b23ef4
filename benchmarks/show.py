"""Runs that were kept, once more, as tables: ``python -m benchmarks.show --coalesce RUN.json ...``.

A ratio is a row's median over the reference's of the same round; the number is the median of the
rounds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.at_rest import AtRest
from benchmarks.coalesce import Coalesce
from benchmarks.dc_fallback import DcFallback
from benchmarks.retain import Retain
from benchmarks.rows import Run
from benchmarks.stream_safety import StreamSafety
from benchmarks.workload import Workload

KINDS: tuple[type[Workload], ...] = (AtRest, Retain, Coalesce, DcFallback, StreamSafety)


def load(kind: type[Workload], path: Path) -> tuple[Workload, Run]:
    """A run, and the benchmark with the options of that run."""
    run: Run = json.loads(path.read_text(encoding="utf-8"))
    return kind(argparse.Namespace(**run["options"])), run


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.show", description=__doc__)
    for kind in KINDS:
        flag = f"--{kind.name.replace('_', '-')}"
        parser.add_argument(flag, type=Path, nargs="+", default=[], metavar="RUN.json")
    options = parser.parse_args()
    for kind in KINDS:
        for path in getattr(options, kind.name):
            workload, run = load(kind, path)
            print(workload.section(run), end="\n\n")


if __name__ == "__main__":
    main()
