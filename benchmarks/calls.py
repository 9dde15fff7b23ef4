"""Python calls of an ordinary step, stock and patched: ``python -m benchmarks.calls [PATCH ...]``.

They have no noise, so that one step tells what patches at rest cost the host. One rank, on the CPU:
of a GPU's backward, which has a thread of its own, Python's profile sees nothing. All patches, if
none is named.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from multiprocessing import get_context
from typing import Any

import torch

import ds_patches
from benchmarks.engines import ready
from benchmarks.tables import markdown

BLOCKS, WIDTH, ROWS = 24, 32, 2
#: ZeRO stage, overlap_comm and micro steps.
CASES = [(stage, overlap, n) for stage in (1, 2) for overlap in (False, True) for n in (1, 4)]
CASES += [(3, True, 1)]
#: In the first steps DeepSpeed, and a patch, find out what there is.
WARMUP = 4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def build(stage: int, overlap: bool, micro_steps: int) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": overlap},
    }
    model = torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine: Any, micro_steps: int) -> None:
    for _ in range(micro_steps):
        engine.backward(engine(torch.randn(ROWS, WIDTH)).square().mean())
        engine.step()


def calls(stage: int, overlap: bool, micro_steps: int) -> int:
    """The fewest of three steps: now and then DeepSpeed does something beside them."""
    engine = build(stage, overlap, micro_steps)
    for _ in range(WARMUP):
        step(engine, micro_steps)
    return min(_count(engine, micro_steps) for _ in range(3))


def _count(engine: Any, micro_steps: int) -> int:
    found = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    step(engine, micro_steps)
    sys.setprofile(None)
    return found


def of_cases(patches: Sequence[str]) -> list[int]:
    """In a process of its own: what ZeRO-3 does to PyTorch's Linear stays."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone | {"DS_ACCELERATOR": "cpu"})
    os.environ.setdefault("MASTER_PORT", "29500")
    import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed()
    for name in patches:
        ds_patches.apply(name)
    return [calls(*case) for case in CASES]


def main() -> None:
    patches = sys.argv[1:] or ready()
    with get_context("spawn").Pool(1, maxtasksperchild=1) as process:
        stock, patched = (process.apply(of_cases, (names,)) for names in ([], patches))
    rows = [
        [str(stage), str(overlap), str(n), f"{before:,}", f"{after:,}", f"{after / before:.4f}"]
        for (stage, overlap, n), before, after in zip(CASES, stock, patched, strict=True)
    ]
    names = ["ZeRO", "overlap_comm", "micro steps", "stock", "patched", "ratio"]
    print(markdown(names, rows))


if __name__ == "__main__":
    main()
