"""Draw runs of ``benchmarks.coalesce``: ``python -m benchmarks.plot RUN.json ... OUT.svg``.

A row of panels per batch size, a column per run: each way's step over native's, by stage.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.coalesce.bars import AT
from benchmarks.coalesce.modes import GATHER_ONCE, MULTI, NO_SYNC, OURS
from benchmarks.provenance import machine

# Okabe and Ito's colours, which the colour-blind can tell apart, and what can be read on them.
_COLOURS = {
    MULTI: ("#E69F00", "black"),
    NO_SYNC: ("#CC79A7", "black"),
    OURS: ("#56B4E9", "black"),
    GATHER_ONCE: ("#009E73", "black"),
}
_WIDTH = 0.22  # of a bar, where the distance of two stages is 1


def main() -> None:
    options = _parse()
    draw(
        [json.loads(path.read_text()) for path in options.runs], options.backwards, options.picture
    )


def draw(runs: Sequence[dict[str, Any]], backwards: int, picture: Path) -> None:
    """`runs`: as the benchmark keeps them. Raises ValueError if none has such a step."""
    ratios = [_ratios(run, backwards) for run in runs]
    batches = sorted({batch for run in ratios for batch, _, _ in run})
    if not batches:
        raise ValueError(f"no step with {backwards} backwards was compared with native")
    with pictures.canvas(picture, len(batches), len(runs)) as panels:
        for panel_row, batch in zip(panels, batches, strict=True):
            for panel, run, found in zip(panel_row, runs, ratios, strict=True):
                panel.set_title(f"{machine(run['provenance'])}, batch {batch}", fontsize=10)
                _panel(panel, {key[1:]: value for key, value in found.items() if key[0] == batch})
            panel_row[0].set_ylabel("step time / native")
        pictures.legend(panels, _COLOURS)


def _panel(panel: Any, ratios: dict[tuple[int, str], dict[str, float]]) -> None:
    """One run and batch size; `ratios` by stage and way."""
    stages = sorted({stage for stage, _ in ratios})
    for place, stage in enumerate(stages):
        names = [name for name in _COLOURS if (stage, name) in ratios]
        for index, name in enumerate(names):
            ratio = ratios[stage, name]
            at = place + (index - (len(names) - 1) / 2) * _WIDTH
            spread = (ratio["median"], ratio["low"], ratio["high"])
            pictures.bar(panel, at, spread, _WIDTH, name, _COLOURS[name])
    pictures.line_at_one(panel, "native")
    pictures.groups(panel, [f"ZeRO-{stage}" for stage in stages])


def _ratios(run: dict[str, Any], backwards: int) -> dict[tuple[int, int, str], dict[str, float]]:
    """The ratios to native, by batch size, stage and way."""
    return {
        (row["batch"], row["stage"], row["mode"]): row["ratio_to_native"]
        for row in run["rows"]
        if row["backwards"] == backwards and row["mode"] in _COLOURS and "ratio_to_native" in row
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.plot", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN.json")
    parser.add_argument("picture", type=Path, metavar="OUT.svg")
    parser.add_argument("--backwards", type=int, default=AT, help="the rows with so many (4)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
