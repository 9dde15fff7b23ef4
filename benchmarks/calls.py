"""Python calls of an ordinary step, stock and patched: ``python -m benchmarks.calls``.

They have no noise, so that one step tells what patches at rest cost the host. One process, CPU.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import get_context
from typing import Any

import torch

import ds_patches
from benchmarks.tables import markdown

BLOCKS, WIDTH, ROWS = 24, 32, 2
#: ZeRO stage and micro steps.
CASES = ((1, 1), (1, 4), (2, 1), (2, 4), (3, 1))
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


def build(stage: int, micro_steps: int) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": stage == 2},
    }
    model = torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine: Any, micro_steps: int) -> None:
    for _ in range(micro_steps):
        engine.backward(engine(torch.randn(ROWS, WIDTH)).square().mean())
        engine.step()


def calls(stage: int, micro_steps: int) -> int:
    """The fewest of three steps: now and then DeepSpeed does something beside them."""
    engine = build(stage, micro_steps)
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


def of_cases(patched: bool) -> list[int]:
    """In a process of its own: what ZeRO-3 does to PyTorch's Linear stays."""
    import deepspeed

    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone | {"MASTER_PORT": os.environ.get("MASTER_PORT", "29500")})
    deepspeed.init_distributed()
    if patched:
        ds_patches.apply_all()
    return [calls(*case) for case in CASES]


def main() -> None:
    with get_context("spawn").Pool(1, maxtasksperchild=1) as process:
        stock, patched = (process.apply(of_cases, (which,)) for which in (False, True))
    rows = [
        [str(stage), str(micro_steps), f"{before:,}", f"{after:,}", f"{after / before:.4f}"]
        for (stage, micro_steps), before, after in zip(CASES, stock, patched, strict=True)
    ]
    print(markdown(["ZeRO", "micro steps", "stock", "patched", "ratio"], rows))


if __name__ == "__main__":
    main()
