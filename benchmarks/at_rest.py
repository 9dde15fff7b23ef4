"""Patches that have nothing to do: ``torchrun --nproc-per-node 2 -m benchmarks.at_rest``.

Ordinary steps of one engine: stock, patched, and stock again, which is what a ratio is worth.
The model has a Transformer's shapes without attention, in bf16, with AdamW.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

from benchmarks.harness import (
    Row,
    batches,
    blocks,
    compare,
    config,
    engine,
    loss_of,
    options,
    start,
)

OPTIONS = {
    "patches": ["all"],
    "stages": [1, 2, 3],
    "micro_steps": [1, 4],
    "batches": [256, 4096, 16384],
    "layers": 24,
    "width": 2048,
    "warmup": 2,
    "steps": 8,
    "rounds": 7,
}


def one_step(engine: Any, micro_batches: list[Tensor]) -> None:
    for inputs in micro_batches:
        engine.backward(loss_of(engine(inputs)))
        engine.step()


def main() -> None:
    of = options(__doc__, OPTIONS, batches=[8], layers=6, width=64, steps=2, rounds=2)
    device = start(of)
    for stage, micro_steps, batch in product(of.stages, of.micro_steps, of.batches):
        data = batches(micro_steps, batch, of.width, device)
        settings = config(batch, micro_steps, stage=stage, reduce_bucket_size=of.width**2)
        with engine(blocks(of.layers, of.width, device), settings) as one:
            step = partial(one_step, one, data)
            rows = [Row("stock", step), Row("patched", step, of.patches), Row("stock again", step)]
            compare(f"ZeRO {stage}, {micro_steps} micro steps, {batch} rows", rows, of, device)


if __name__ == "__main__":
    main()
