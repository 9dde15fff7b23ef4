"""Several backwards, one reduction: ``torchrun --nproc-per-node 2 -m benchmarks.coalesce``.

A step is N forwards and backwards over N micro batches. "native" is DeepSpeed's own
``coalesce_grad_reduction()`` (0.19.1 or newer), "multi" does without a block, "patched" is the
patch's block. The model is 8 x (Linear(4096, bias=False) + ReLU) in bf16, with AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

from benchmarks.harness import Row, batches, compare, config, engine, loss_of, mlp, options, start

OPTIONS = {
    "stages": [1, 2, 3],
    "backwards": [2, 4, 8],
    "batches": [256, 4096],
    "layers": 8,
    "width": 4096,
    "reduce_bucket_size": 5 * 10**8,
    "warmup": 2,
    "steps": 6,
    "rounds": 15,
}


def boundaries(engine: Any, micro_batches: list[Tensor]) -> None:
    """DeepSpeed's first way: every backward but the last is said to be no boundary."""
    for number, inputs in enumerate(micro_batches, start=1):
        engine.set_gradient_accumulation_boundary(number == len(micro_batches))
        engine.backward(loss_of(engine(inputs)))
    engine.step()
    # As an engine begins: it goes by its own count again, for the row that has the next turn.
    engine._is_gradient_accumulation_boundary = None


def block(engine: Any, micro_batches: list[Tensor], **arguments: Any) -> None:
    with engine.coalesce_grad_reduction(**arguments):
        for inputs in micro_batches:
            engine.backward(loss_of(engine(inputs)))
    engine.step()


#: By row: the step, whether it is patched, and the stages that have it.
WAYS: dict[str, tuple[Callable[..., None], bool, tuple[int, ...]]] = {
    "native": (block, False, (1, 2, 3)),
    "multi": (boundaries, False, (1, 2, 3)),
    "patched": (block, True, (1, 2, 3)),
    "patched, gather_once=False": (partial(block, gather_once=False), True, (3,)),
    "patched, gather_once=True": (partial(block, gather_once=True), True, (3,)),
}


def main() -> None:
    small = {
        "backwards": [2],
        "batches": [8],
        "layers": 2,
        "width": 64,
        "reduce_bucket_size": 10**4,
    }
    of = options(__doc__, OPTIONS, **small, steps=1, rounds=2)
    device = start(of)
    for batch, backwards, stage in product(of.batches, of.backwards, of.stages):
        data = batches(backwards, batch, of.width, device)
        settings = config(batch, stage=stage, reduce_bucket_size=of.reduce_bucket_size)
        with engine(mlp(of.layers, of.width, device), settings) as one:
            rows = [
                Row(name, partial(way, one, data), ["coalesce"] if patched else [])
                for name, (way, patched, stages) in WAYS.items()
                if stage in stages
            ]
            compare(f"ZeRO {stage}, {backwards} backwards, {batch} rows", rows, of, device)


if __name__ == "__main__":
    main()
