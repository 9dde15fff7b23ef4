"""Gradients that come to a parameter twice in a backward, beside reductions that are late."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.gpu.test_stream_safety import unlike
from tests.stream_safety import on_streams
from tests.world import World


class Recomputed(on_streams.Layers):
    """Each layer in a graph task of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self[0].weight.dtype).requires_grad_()
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=True)
        return x.float()


def recomputed() -> nn.Module:
    return Recomputed(*on_streams.model())


#: Where what comes twice is added before it is reduced, or after.
ROUNDS = {"patched": True, "within": 1e-5}


def forwards(trainer: Any, step: int, count: int = 2) -> None:
    """Run so many forwards, and one backward over their losses."""
    losses = [trainer(None).square().mean() for _ in range(count)]
    trainer.backward(sum(losses))


LATE = {1: "late_reductions", 2: "late_reductions", 3: "late_partitions"}
BUCKETS = {"small": {}, "large": {"reduce_bucket_size": 10**6}, "tiny": {"reduce_bucket_size": 32}}
SCATTERED: dict[str, Any] = {"contiguous_gradients": False}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("stage", LATE)
def test_equal_to_no_overlap(living_gpus: World, stage: int, bucket: str, count: int) -> None:
    case = {"script": partial(forwards, count=count), "model": recomputed, "late": LATE[stage]}
    beside = ("accumulation", "zero3_retain")
    options = {"stage": stage, "beside": beside, **BUCKETS[bucket], **case, **ROUNDS}
    assert not unlike(living_gpus, f"{count} forwards", **options)


@pytest.mark.parametrize("zero", [SCATTERED, {"reduce_scatter": False}], ids=["scattered", "all"])
@pytest.mark.parametrize("stage", [1, 2])
def test_equal_with_other_reductions(living_gpus: World, stage: int, zero: Any) -> None:
    case = {"script": forwards, "model": recomputed, "late": "late_reductions"}
    beside = ("accumulation",)
    options = {"stage": stage, "beside": beside, **zero, **case, **ROUNDS}
    assert not unlike(living_gpus, "two forwards", **options)


@pytest.mark.parametrize("late", ["", "late_gradients"])
@pytest.mark.parametrize("stage", [2, 3])
def test_micro_steps_of_plain_backwards(living_gpus: World, stage: int, late: str) -> None:
    """Divided where they are reduced."""
    case = {"script": plain, "micro_steps": 2, "late": late, "beside": ("accumulation",)}
    assert not unlike(living_gpus, "plain", stage=stage, patched=True, **case)


def plain(trainer: Any, step: int, micro: int) -> None:
    trainer(None).square().mean().backward()
