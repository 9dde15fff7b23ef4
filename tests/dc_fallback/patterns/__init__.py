"""Models that Dynamo cannot compile whole, one for each way of a frame to run eagerly.

Each takes token ids and targets and returns its loss, and is built from a seed.
"""
# ruff: noqa: F403, F405

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dc_fallback.patterns.experts import *
from tests.dc_fallback.patterns.frames import *
from tests.dc_fallback.patterns.parameters import *

#: Every pattern that the patch promises; the stand-in and real GPUs run them all.
ALL = [
    kind
    for kind in [*vars().values()]
    if isinstance(kind, type)
    and issubclass(kind, Compiled)
    and kind not in (Evaluated, RecomputedMethod, OwnCompile)  # which scripts train
]


def build(pattern: str, width: int = WIDTH) -> nn.Module:
    """`pattern`: its name, or ``skipped`` and its name: the whole forward runs eagerly then."""
    torch.manual_seed(1234)
    skips, _, name = pattern.rpartition(" ")
    model: nn.Module = globals()[name](width)
    if skips:
        kind = type(model)
        forward = torch.compiler.disable(kind.forward)
        model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def inputs(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one micro batch, other ones on each rank, where this one trains."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().current_device_name()
    source = torch.Generator().manual_seed(1000 * dist.get_rank() + 10 * step + part)
    tokens = torch.randint(0, VOCABULARY, (4, 6), generator=source)
    return tokens.to(device), ((3 * tokens + 1) % VOCABULARY).to(device)
