"""The collectives of a step: how many ran, and the bytes that they put on the wire."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.timing import Step, ignore, wait_for

#: Of the bytes of a whole tensor, how many times over a rank sends them, in units of (n-1)/n for n
#: ranks. An all-reduce is a reduce-scatter and an all-gather. In a reduce or a broadcast all ranks
#: but one send everything once, which is (n-1)/n of it on the average rank.
_SENT = {"all_gather": 1, "all_reduce": 2, "reduce_scatter": 1, "reduce": 1, "broadcast": 1}
#: Those that add up.
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
_KIND = re.compile(
    r"(nccl[a-z0-9]*?kernel|c10d::)(allgather|allreduce|reducescatter|reduce|broadcast)"
)


def counts(step: Step, device: torch.device) -> dict[str, int]:
    """How many collectives one step runs, by kind: NCCL kernels on a GPU, calls elsewhere."""
    if device.type != "cuda":
        return dict(Counter(one.kind for one in sent(step)))
    wait_for(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(ignore)
        wait_for(device)
    # The profiler also draws the calls on the GPU's timeline: those are named "nccl:...".
    kinds = (_kind(event.name) for event in profiler.events() or ())
    return dict(Counter(kind for kind in kinds if kind is not None))


@dataclass(frozen=True)
class Sent:
    """One collective. `bytes`: what the average rank sends in it."""

    kind: str
    phase: str
    bytes: float


def sent(step: Step) -> list[Sent]:
    """The collectives that this rank calls in one step. Every process group has all ranks."""
    found: list[Sent] = []
    with _Calls() as calls:

        def take(phase: str) -> None:
            found.extend(Sent(kind, phase, size) for kind, size in calls.seen)
            calls.seen.clear()

        step(take)
    return found


class _Calls(TorchDispatchMode):
    """Kind and sent bytes of collectives: every one passes PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, float]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        # What raised was not sent: where gloo has no reduce-scatter, another call follows.
        if kind := _kind(function._schema.name):
            ranks = dist.get_world_size()
            whole = max(_bytes(argument) for argument in args)
            self.seen.append((kind, whole * _SENT[kind] * (ranks - 1) / ranks))
        return result


def _kind(name: str) -> str | None:
    """Of a kernel, or of an operator of c10d; None for anything else."""
    found = _KIND.match(name.lower().replace("_", ""))
    if found is None:
        return None
    return next(kind for kind in _SENT if kind.replace("_", "") == found[2])


def _bytes(argument: Any) -> int:
    """Of an argument's tensors: the inputs, or the outputs. The larger of both is the whole."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(argument))


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for part in argument:
            yield from _tensors(part)
