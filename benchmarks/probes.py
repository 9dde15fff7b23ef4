"""What is read of a step besides its time: memory, and gradients, held against plain PyTorch's.

Each takes a step of its own, so that reading never stands in a timed one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engines import loss_of
from benchmarks.timing import Step, ignore, wait_for

Forward = Callable[[Tensor], Tensor]

_MIB = 2**20
_PEAK_STEPS = 3


def allocated_mib(device: torch.device) -> float | None:
    """MiB in live tensors on `device`; None where nobody counts them (CPU)."""
    if device.type != "cuda":
        return None
    wait_for(device)
    return float(torch.cuda.memory_allocated(device)) / _MIB


def held_mib(step: Step, device: torch.device, before: float | None) -> dict[str, float | None]:
    """MiB that one step holds at the end of each of its phases, above `before`."""
    found: dict[str, float | None] = {}

    def look(ended: str) -> None:
        now = allocated_mib(device)
        found[ended] = None if now is None or before is None else now - before

    step(look)
    return found


def peak_mib(step: Step, device: torch.device, before: float | None) -> float | None:
    """The most MiB at any moment of some steps that nothing interrupts.

    With memory that was given up and that a stream has still to get done with.
    """
    if before is None:
        return None
    wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(_PEAK_STEPS):
        step(ignore)
    wait_for(device)
    return float(torch.cuda.memory_stats(device)["active_bytes.all.peak"]) / _MIB - before


def gradient_error(
    step: Step, engine: Any, plain: Callable[[Forward], None], phase: str, device: torch.device
) -> float:
    """How far the gradients of one step are off at the end of its `phase`: of all weights the
    largest ``||gradient - reference|| / ||reference||``, NaN if any is.

    plain: the backwards of that step; see `_plain_gradients`.
    """
    errors: list[float] = []
    reference = _plain_gradients(engine, plain)

    def look(ended: str) -> None:
        if ended == phase:
            wait_for(device)  # reduction has a stream of its own
            errors.extend(map(_relative, _full_gradients(engine), reference))

    step(look)
    return max(errors, key=lambda error: (error != error, error))


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))


def _full_gradients(engine: Any) -> list[Tensor]:
    """Every weight's reduced gradient, gathered from all ranks; float32."""
    from deepspeed.utils import safe_get_full_grad

    gradients = []
    for name, param in engine.module.named_parameters():
        gradient = safe_get_full_grad(param)
        assert gradient is not None, f"{name} has no gradient"
        gradients.append(gradient.float())
    return gradients


def _plain_gradients(engine: Any, train: Callable[[Forward], None]) -> list[Tensor]:
    """What PyTorch accumulates while `train` runs backwards, averaged over the ranks; float32.

    `train` is given the forward of ``engines``' layers with the engine's weights, in functions,
    since DeepSpeed replaces ``torch.nn.functional.linear``.
    """
    import deepspeed

    leaves = []
    for param in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([param]):
            leaves.append(param.detach().clone().requires_grad_())

    def forward(inputs: Tensor) -> Tensor:
        for leaf in leaves:
            if leaf.dim() == 1:
                inputs = torch.rms_norm(inputs, leaf.shape, leaf)
            else:
                inputs = torch.relu(inputs @ leaf.t())
        return inputs

    train(forward)
    gradients = []
    for leaf in leaves:
        assert leaf.grad is not None
        gradient = leaf.grad.float()
        dist.all_reduce(gradient)
        gradients.append(gradient / dist.get_world_size())
    return gradients


def plain_backwards(batches: Sequence[Tensor], micro_steps: int, forward: Forward) -> None:
    """The backwards of one step, in plain PyTorch, each of a part of its `micro_steps`."""
    for inputs in batches:
        (loss_of(forward(inputs)) / micro_steps).backward()  # type: ignore[no-untyped-call]
