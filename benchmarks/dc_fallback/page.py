"""Put runs into a page: ``python -m benchmarks.dc_fallback.page RUN.json ... PAGE.md``.

Writes their tables between the marks of PAGE.md, in the place of what stood there, and draws them
in a file beside it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.dc_fallback import table
from benchmarks.dc_fallback.plot import draw

_BEGIN, _END = "<!-- dc_fallback:begin -->", "<!-- dc_fallback:end -->"
_PICTURE = "dc-fallback.svg"


def main() -> None:
    options = _parse()
    page = options.page
    runs = {
        os.path.relpath(path, page.parent): json.loads(path.read_text()) for path in options.runs
    }
    draw(list(runs.values()), page.parent / _PICTURE)
    text = page.read_text(encoding="utf-8")
    page.write_text(filled(text, runs), encoding="utf-8")


def filled(text: str, runs: Mapping[str, Mapping[str, Any]]) -> str:
    """`text` with the tables of `runs`, by the path that it can link to."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"the page has no {_BEGIN} and {_END}")
    parts = [begin, f"![Step time and peak memory over eager ZeRO-3's]({_PICTURE})"]
    for path, run in runs.items():
        parts += [
            f"### DeepSpeed {run['provenance']['deepspeed']}",
            table.section(run),
            f"Everything behind the tables: [{Path(path).name}]({path}).",
        ]
    return before + "\n\n".join([*parts, end]) + after


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.dc_fallback.page", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN.json")
    parser.add_argument("page", type=Path, metavar="PAGE.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
