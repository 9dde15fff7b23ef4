"""What is trained: a plain MLP, a ``DeepSpeedEngine`` around it, stock or patched."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

DTYPE = torch.bfloat16
SEED = 1234


def mlp(layers: int, width: int, device: torch.device) -> nn.Sequential:
    """`layers` times Linear(`width`, bias=False) + ReLU: the same weights at every call."""
    return chain([(width, width)] * layers, device)


def blocks(count: int, width: int, device: torch.device) -> nn.Sequential:
    """`count` times what a layer of a Transformer has to reduce, without its attention.

    RMSNorm, four Linear(`width`), RMSNorm, one Linear to 4 x `width` and one back, as in `mlp`.
    """
    wide = 4 * width
    block = [(width,), *[(width, width)] * 4, (width,), (width, wide), (wide, width)]
    return chain(block * count, device)


def chain(shapes: Sequence[tuple[int, ...]], device: torch.device) -> nn.Sequential:
    """Of each `(n, m)` Linear(n, m, bias=False) + ReLU, of each `(n,)` RMSNorm(n); one for each."""
    torch.manual_seed(SEED)
    with device:
        return nn.Sequential(*(module for shape in shapes for module in _layer(shape)))


def _layer(shape: tuple[int, ...]) -> list[nn.Module]:
    if len(shape) == 1:
        return [nn.RMSNorm(shape[0], dtype=DTYPE)]
    linear = nn.Linear(*shape, bias=False, dtype=DTYPE)
    nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    return [linear, nn.ReLU()]


def config(batch: int, micro_steps: int = 1, **zero_optimization: Any) -> dict[str, Any]:
    """Return DeepSpeed's configuration for `chain`, with all that has moved between releases."""
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
            **zero_optimization,
        },
    }


@contextmanager
def engine_around(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> Iterator[Any]:
    """A ``DeepSpeedEngine`` that is destroyed afterwards, whatever happens in between."""
    import deepspeed

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
def patch(name: str, wanted: bool) -> Iterator[None]:
    """Stock or patched inside, stock outside; never the one in the other's name."""
    import ds_patches

    if not wanted:
        if ds_patches.is_applied(name):
            raise RuntimeError(f"{name} is applied where stock DeepSpeed is to be measured")
        yield
        return
    ds_patches.apply(name)  # raises if it is not live
    try:
        yield
    finally:
        ds_patches.unapply(name)
