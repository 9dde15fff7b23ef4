"""stream_safety, measured: ``torchrun --nproc-per-node 2 -m benchmarks.stream_safety [options]``.

Steps with and without overlap_comm, in a Transformer's shapes: RMSNorm, four Linear(4096), RMSNorm,
one to 16384 and one back, four times; stock and patched in turns on one engine.
NCCL_P2P_DISABLE=1 in the environment measures machines without direct copies between GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from benchmarks.at_rest import MicroSteps
from benchmarks.harness import main
from benchmarks.rows import Row
from benchmarks.tables import Bar
from benchmarks.workload import PATCHED, STOCK

# Where the GPUs cannot copy directly between each other, so that communication is what takes long.
_STEP = 0.90

_FULL: dict[str, Any] = {
    "stages": [1, 2],
    "batches": [256, 4096, 16384],
    "reduce_bucket_sizes": [2**24, 5 * 10**7],  # width squared, which is "auto", and large
    "micro_steps": [1, 4],
    "layers": 24,
    "width": 4096,
    "warmup": 2,
    "steps": 6,
    "rounds": 3,
}
_SMOKE = _FULL | {"batches": [8], "reduce_bucket_sizes": [10**3, 10**4], "micro_steps": [1]}
_SMOKE |= {"layers": 6, "width": 64, "warmup": 1, "steps": 1, "rounds": 2}


class StreamSafety(MicroSteps):
    __doc__ = __doc__
    name, patches = "stream_safety", ("stream_safety",)
    keys = ("micro_steps", "batch", "reduce_bucket_size", "stage", "overlap", "mode")
    full, smoke = _FULL, _SMOKE

    def standing_together(self) -> Iterator[list[Row]]:
        of = self.options
        sizes = (of.micro_steps, of.batches, of.reduce_bucket_sizes, of.stages, (False, True))
        for size in product(*sizes):
            yield self.rows(*size, modes=(STOCK, PATCHED))

    def zero(self, row: Row) -> dict[str, Any]:
        bucket = row["reduce_bucket_size"]
        return {"reduce_bucket_size": bucket, "overlap_comm": row["overlap"]}

    def where(self, row: Row) -> str:
        one = f"batch {row['batch']}, bucket {row['reduce_bucket_size']:,}"
        return one if row["micro_steps"] == 1 else f"{one}, {row['micro_steps']} micro steps"

    def label(self, row: Row) -> tuple[str, str]:
        return f"Z{row['stage']}{' overlap' * row['overlap']}", row["mode"]

    def bars(self, rows: Sequence[Row], p2p: bool) -> Iterator[Bar]:
        """Of the patched rows with overlap_comm."""
        for row in rows:
            if row["overlap"] and row["mode"] == PATCHED:
                bar = _STEP if row["stage"] == 2 and not p2p else None
                name = f"step, {self.label(row)[0]}, {self.where(row)}: patched / stock"
                yield Bar.of_rounds(name, self.ratios(row, rows), bar)


if __name__ == "__main__":
    raise SystemExit(main(StreamSafety))
