"""Draw the ratios of many runs, a dot for each round: ``python -m benchmarks.dots``.

    python -m benchmarks.dots OUT.svg --at-rest RUN.json --retain RUN.json --coalesce RUN.json ...
        --dc-fallback RUN.json --stream-safety RUN.json ...

A ratio is a row's median over the reference's of the same round; the number is the median of the
rounds. Of a line that several runs have, the last run's is drawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import pictures
from benchmarks.provenance import p2p

_COLOUR, _AGAIN = "#1E88D2", "#B0B0B0"
_BACKWARDS = 4
_ORDINARY, _RETAINED, _TWO_FORWARDS = "1", "4", "8"


class Series(NamedTuple):
    """One line of the picture; again: the reference over itself, where that was taken."""

    name: str
    ratios: Sequence[float]
    again: Sequence[float] = ()


def at_rest(run: Mapping[str, Any]) -> Iterator[Series]:
    for row in run["rows"]:
        steps = f"{row['micro_steps']} micro step" + "s" * (row["micro_steps"] > 1)
        name = f"ZeRO {row['stage']}, {steps}, {row['batch']} rows"
        yield Series(name, row["patched"], row["stock"])


def retain(run: Mapping[str, Any]) -> Iterator[Series]:
    named = {_RETAINED: "patched: two backwards, one forward", _TWO_FORWARDS: "stock: two forwards"}
    for row, name in named.items():
        yield Series(name, _over(run["rows"][row], run["rows"][_ORDINARY]))


def coalesce(run: Mapping[str, Any]) -> Iterator[Series]:
    rows = [row for row in run["rows"] if row["backwards"] == _BACKWARDS and "ms_by_round" in row]
    native = {_sizes(row): row for row in rows if row["mode"] == "native"}
    for row in rows:
        if row["mode"] in ("ours", "ours, gather_once"):
            once = ", gather_once" if "once" in row["mode"] else ""
            name = f"ZeRO {row['stage']}{once}, {row['batch']} rows, {_links(run)}"
            yield Series(name, _over(row, native[_sizes(row)]))


def dc_fallback(run: Mapping[str, Any]) -> Iterator[Series]:
    ms = {(row["mode"], row["skipped"]): row["ms"]["median"] for row in run["rows"]}
    for skipped, base in (("nothing", "stock"), ("half", "eager"), ("all", "eager")):
        ratio = ms["patched", skipped] / ms[base, skipped]
        yield Series(f"{skipped} skipped, over {base}", [ratio])


def stream_safety(run: Mapping[str, Any]) -> Iterator[Series]:
    rows = {_sizes(row): row for row in run["rows"] if row["overlap"] and row["mode"] == "stock"}
    for row in run["rows"]:
        if row["overlap"] and row["mode"] == "patched":
            steps = f", {row['micro_steps']} micro steps" * (row["micro_steps"] > 1)
            size = f"{row['batch']} rows, bucket {row['reduce_bucket_size'] / 1e6:.0f}M"
            name = f"ZeRO {row['stage']}, {size}{steps}, {_links(run)}"
            yield Series(name, _over(row, rows[_sizes(row)]))


#: By the option that names the runs: the title, and what reads one.
KINDS = {
    "at_rest": ("At rest: patched / stock (grey: stock / stock)", at_rest),
    "retain": ("zero3_retain: / an ordinary step of stock", retain),
    "coalesce": ("coalesce: 4 backwards in a block / DeepSpeed's own block", coalesce),
    "dc_fallback": ("dc_fallback: DeepCompile with skipped frames", dc_fallback),
    "stream_safety": ("stream_safety, all parts: patched / stock, overlap_comm", stream_safety),
}


def draw(groups: Mapping[str, Sequence[Series]], picture: Path) -> None:
    """`groups`: the lines of each panel, by its title."""
    heights = [len(lines) for lines in groups.values()]
    with pictures.stack(picture, heights) as panels:
        for panel, (title, lines) in zip(panels, groups.items(), strict=True):
            _panel(panel, title, lines)


def _lines(
    read: Callable[[Mapping[str, Any]], Iterator[Series]], runs: Sequence[Path]
) -> list[Series]:
    found = (line for run in runs for line in read(json.loads(run.read_text(encoding="utf-8"))))
    return list({line.name: line for line in found}.values())


def _panel(panel: Any, title: str, lines: Sequence[Series]) -> None:
    panel.set_title(title, fontsize=10, loc="left")
    for place, line in enumerate(lines):
        panel.plot(line.again, [place] * len(line.again), "o", ms=3.5, color=_AGAIN, alpha=0.6)
        panel.plot(line.ratios, [place] * len(line.ratios), "o", ms=4.5, color=_COLOUR, alpha=0.6)
        middle = statistics.median(line.ratios)
        panel.plot([middle], [place], "|", ms=11, mew=2, color=_COLOUR)
        at = (1.01, place)
        panel.annotate(f"{middle:.2f}", at, xycoords=("axes fraction", "data"), va="center")
    panel.set_yticks(range(len(lines)), [line.name for line in lines])
    panel.set_ylim(len(lines) - 0.4, -0.6)
    panel.axvline(1, color="#808080", lw=1, ls="--")
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _over(row: Mapping[str, Any], base: Mapping[str, Any]) -> list[float]:
    return [one / other for one, other in zip(_rounds(row), _rounds(base), strict=True)]


def _rounds(row: Mapping[str, Any]) -> list[float]:
    """The median of each round."""
    if "ms_by_round" in row:
        return list(row["ms_by_round"])
    return [statistics.median(block) for block in row["ms"]]


def _sizes(row: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("stage", "batch", "reduce_bucket_size", "micro_steps")
    return tuple(row.get(name) for name in names)


def _links(run: Mapping[str, Any]) -> str:
    return "P2P" if p2p(run["provenance"]) else "no P2P"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.dots", description=__doc__)
    for kind in KINDS:
        flag = f"--{kind.replace('_', '-')}"
        parser.add_argument(flag, type=Path, nargs="+", default=[], metavar="RUN.json")
    parser.add_argument("picture", type=Path, metavar="OUT.svg")
    options = vars(parser.parse_args())
    groups = {title: _lines(read, options[kind]) for kind, (title, read) in KINDS.items()}
    draw({title: lines for title, lines in groups.items() if lines}, options["picture"])


if __name__ == "__main__":
    main()
