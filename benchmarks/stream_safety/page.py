"""Put runs into a page: ``python -m benchmarks.stream_safety.page RUN.json ... PAGE.md``.

Writes their tables between the marks of PAGE.md, in the place of what stood there, and draws them
in a file beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks import pages
from benchmarks.pages import Run
from benchmarks.provenance import machine
from benchmarks.stream_safety import table
from benchmarks.stream_safety.plot import draw

_PICTURE = "stream-safety.svg"


def filled(text: str, runs: Mapping[str, Run]) -> str:
    """`text` with the tables of `runs`, by the path that it can link to."""
    parts = [f"![Step time, and NCCL time exposed and hidden, stock and patched]({_PICTURE})"]
    for path, run in runs.items():
        origin = run["provenance"]
        heading = f"### DeepSpeed {origin['deepspeed']}, {machine(origin)}"
        parts += [heading, table.section(run), pages.link(path)]
    return pages.between_marks(text, "stream_safety", parts)


if __name__ == "__main__":
    pages.main("benchmarks.stream_safety.page", __doc__, _PICTURE, draw, filled)
