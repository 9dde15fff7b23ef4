"""Put runs into a page: ``python -m benchmarks.dc_fallback.page RUN.json ... PAGE.md``.

Writes their tables between the marks of PAGE.md, in the place of what stood there, and draws them
in a file beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks import pages
from benchmarks.dc_fallback import table
from benchmarks.dc_fallback.plot import draw
from benchmarks.pages import Run

_PICTURE = "dc-fallback.svg"


def filled(text: str, runs: Mapping[str, Run]) -> str:
    """`text` with the tables of `runs`, by the path that it can link to."""
    parts = [f"![Step time and peak memory over eager ZeRO-3's]({_PICTURE})"]
    for path, run in runs.items():
        heading = f"## DeepSpeed {run['provenance']['deepspeed']}"
        parts += [heading, table.section(run), pages.link(path)]
    return pages.between_marks(text, "dc_fallback", parts)


if __name__ == "__main__":
    pages.main("benchmarks.dc_fallback.page", __doc__, _PICTURE, draw, filled)
