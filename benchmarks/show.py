"""Runs that were kept, once more: ``python -m benchmarks.show --coalesce RUN.json ...``.

Prints their tables; or, with ``--picture OUT.svg``, draws every ratio, with a dot for each round.
A ratio is a row's median over the reference's of the same round; the number is the median of the
rounds. Of a line that several runs have, the last run's is drawn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import picture
from benchmarks.at_rest import AtRest
from benchmarks.coalesce import Coalesce
from benchmarks.dc_fallback import DcFallback
from benchmarks.retain import Retain
from benchmarks.rows import Run
from benchmarks.stream_safety import StreamSafety
from benchmarks.workload import Series, Workload

KINDS: tuple[type[Workload], ...] = (AtRest, Retain, Coalesce, DcFallback, StreamSafety)


def load(path: Path) -> Run:
    run: Run = json.loads(path.read_text(encoding="utf-8"))
    return run


def of(kind: type[Workload], run: Run) -> Workload:
    """The benchmark with the options of that run."""
    return kind(argparse.Namespace(**run["options"]))


def lines(kind: type[Workload], runs: Sequence[Run]) -> list[Series]:
    found = (line for run in runs for line in of(kind, run).series(run))
    return list({line.name: line for line in found}.values())


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.show", description=__doc__)
    for kind in KINDS:
        flag = f"--{kind.name.replace('_', '-')}"
        parser.add_argument(flag, type=Path, nargs="+", default=[], metavar="RUN.json")
    parser.add_argument("--picture", type=Path, metavar="OUT.svg")
    options = parser.parse_args()
    runs = {kind: [load(path) for path in getattr(options, kind.name)] for kind in KINDS}
    if options.picture:
        panels = {kind.title: lines(kind, found) for kind, found in runs.items() if found}
        picture.draw(panels, options.picture)
        return
    for kind, found in runs.items():
        for run in found:
            print(of(kind, run).section(run), end="\n\n")


if __name__ == "__main__":
    main()
