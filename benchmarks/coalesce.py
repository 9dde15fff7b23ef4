"""Several backwards, one reduction: ``torchrun --nproc-per-node 2 -m benchmarks.coalesce``.

A step is N forwards and backwards over N micro batches. "native" is DeepSpeed's own
``coalesce_grad_reduction()`` (0.19.1 or newer), "multi" does without a block, "patched" is the
patch's block. Stage 3 comes a second time with a low ``stage3_max_live_parameters``, where a block
gathers as DeepSpeed does. The model is 8 x (Linear(4096, bias=False) + ReLU) in bf16, with AdamW.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

from benchmarks.harness import Row, batches, compare, config, engine, loss_of, mlp, options, start

#: By name: the settings.
STAGES: dict[str, dict[str, int]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3, gathered as DeepSpeed does": {"stage": 3, "stage3_max_live_parameters": 1},
}

OPTIONS = {
    "stages": [*STAGES],
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


def block(engine: Any, micro_batches: list[Tensor]) -> None:
    with engine.coalesce_grad_reduction():
        for inputs in micro_batches:
            engine.backward(loss_of(engine(inputs)))
    engine.step()


#: By row: the step, and what is applied.
WAYS: dict[str, tuple[Callable[..., None], list[str]]] = {
    "native": (block, []),
    "multi": (boundaries, []),
    "patched": (block, ["coalesce"]),
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
        bucket = {"reduce_bucket_size": of.reduce_bucket_size}
        settings = config(batch, **STAGES[stage], **bucket)
        with engine(mlp(of.layers, of.width, device), settings) as trained:
            rows = [Row(name, partial(way, trained, data), on) for name, (way, on) in WAYS.items()]
            compare(f"ZeRO {stage}, {backwards} backwards, {batch} rows", rows, of, device)


if __name__ == "__main__":
    main()
