"""What is trained: a chain of layers, its data, and an engine around it, stock or patched."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

DTYPE = torch.bfloat16
SEED = 1234

# Enough for real updates, too little for a run of some hundred steps to leave the weights that
# the first step saw: every row measures the same numbers.
_LEARNING_RATE = 1e-6


def mlp(layers: int, width: int, device: torch.device) -> nn.Sequential:
    """`layers` times Linear(`width`, bias=False) + ReLU: the same weights at every call."""
    return _chain([(width, width)] * layers, device)


def blocks(layers: int, width: int, device: torch.device) -> nn.Sequential:
    """What a layer of a Transformer has to reduce, without its attention, once for six `layers`.

    RMSNorm, four Linear(`width`), RMSNorm, one Linear to 4 x `width` and one back, as in `mlp`.
    """
    wide = 4 * width
    block = [(width,), *[(width, width)] * 4, (width,), (width, wide), (wide, width)]
    return _chain(block * (layers // 6), device)


def _chain(shapes: Sequence[tuple[int, ...]], device: torch.device) -> nn.Sequential:
    """Of each `(n, m)` Linear(n, m, bias=False) + ReLU, of each `(n,)` RMSNorm(n); one for each."""
    torch.manual_seed(SEED)
    with device:
        return nn.Sequential(*(module for shape in shapes for module in _layer(shape)))


def _layer(shape: tuple[int, ...]) -> list[nn.Module]:
    if len(shape) == 1:
        return [nn.RMSNorm(shape[0], dtype=DTYPE)]
    linear = nn.Linear(shape[0], shape[1], bias=False, dtype=DTYPE)
    nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    return [linear, nn.ReLU()]


def batches(count: int, rows: int, width: int, device: torch.device) -> tuple[Tensor, ...]:
    """This rank's, each [rows, width]; every rank has its own."""
    generator = torch.Generator(device).manual_seed(SEED + 1 + dist.get_rank())
    shape = (rows, width)
    return tuple(
        torch.randn(shape, generator=generator, dtype=DTYPE, device=device) for _ in range(count)
    )


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.float().pow(2).mean()


def config(batch: int, micro_steps: int = 1, **zero_optimization: Any) -> dict[str, Any]:
    """Return DeepSpeed's configuration, with all that has moved between releases."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "stage3_param_persistence_threshold": 0,
            **zero_optimization,
        },
    }


@contextmanager
def around(model: nn.Module, settings: dict[str, Any]) -> Iterator[Any]:
    """A ``DeepSpeedEngine`` that is destroyed afterwards, whatever happens in between."""
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    try:
        yield engine
    finally:
        engine.destroy()
        # DeepSpeed's caches keep a destroyed engine alive. Its tensors need not stay with it.
        for holder in (*model.parameters(), engine.optimizer):
            vars(holder).clear()


def free(device: torch.device) -> None:
    """Give back what a dropped engine held; a CPU's memory is not measured."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def ready() -> list[str]:
    """The patches for this DeepSpeed, which `apply_all` applies."""
    import ds_patches

    found = ds_patches.status()
    return [name for name, status in found.items() if status.state is ds_patches.State.READY]


@contextmanager
def applied(names: Sequence[str]) -> Iterator[None]:
    """These patches inside, none outside; no name is stock. Never the one in the other's name."""
    import ds_patches

    live = [name for name in ds_patches.names() if ds_patches.is_applied(name)]
    if names and set(names) <= set(live):  # around a whole row, and again around its parts
        yield
        return
    if live:
        raise RuntimeError(f"{', '.join(live)}: applied where other patches are to be measured")
    for name in names:
        ds_patches.apply(name)  # raises if it is not live
    try:
        yield
    finally:
        ds_patches.unapply_all()
