"""What DeepSpeed's optimizers step with, by parameter; the only place that knows their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_patches.core.errors import NotChecked
from ds_patches.upstream.kinds import Kind, kind_of


class Slice(NamedTuple):
    """Where a parameter, or this rank's part of it, lies in a tensor that is stepped.

    skipped: how many elements of the parameter come before, and belong to other ranks.
    """

    stepped: Tensor
    start: int
    length: int
    skipped: int = 0


Slices = Iterator[tuple[Tensor, Slice]]


def slices(optimizer: Any) -> dict[int, Slice]:
    """Return this rank's slices by the id of the parameter; one that lies elsewhere has none.

    Raises NotChecked for an optimizer that is not known to step with these.
    """
    return {id(param): where for param, where in located(optimizer)}


def located(optimizer: Any) -> Slices:
    """Return the same, each with its parameter."""
    kind = kind_of(optimizer)
    found = _flat if kind in _FLAT else {Kind.ZERO3: _stage3, Kind.FP16_UNFUSED: _unfused}.get(kind)
    if found is None and isinstance(optimizer, torch.optim.Optimizer):
        found = _plain
    past = [name for name in _PAST_GRAD if getattr(optimizer, name, False)]
    if found is None or past:
        name = ", ".join([type(optimizer).__name__, *past])
        raise NotChecked(f"train_check() does not cover {name}")
    return found(optimizer)


def both(param: Any, where: Slice) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a parameter as forwards use it, and as the optimizer steps it."""
    mine = getattr(param, "ds_tensor", param).detach().reshape(-1)
    mine, stepped = mine.narrow(0, where.skipped, where.length), where.stepped.detach()
    if stepped.dim() != 1:  # of a parameter by itself, laid out as that is
        return mine.view(stepped.shape), stepped
    return mine, stepped.narrow(0, where.start, where.length)


#: Where parameters lie flat, one behind the other: of each group the parameters, and a partition.
_FLAT = {
    Kind.ZERO12: ("round_robin_bit16_groups", "single_partition_of_fp32_groups"),
    Kind.BF16: ("bf16_groups", "fp32_groups_flat_partition"),
    Kind.FP16: ("fp16_groups", "fp32_groups_flat"),
}
#: Such an optimizer does not find its gradients in `.grad`, or swaps them.
_PAST_GRAD = ("fused_adam_legacy", "fused_lamb_legacy", "zenflow", "swap_optimizer")


def stepping(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the PyTorch optimizers that do the step."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    backup = getattr(optimizer, "backup_optimizer", None)  # of partly offloaded states
    return [optimizer.optimizer, *([backup] if backup is not None else [])]


def takes_from_parameters(optimizer: Any) -> bool:
    """Whether a step may take gradients that still lie on parameters; ZeRO-3's never does."""
    return kind_of(optimizer) is not Kind.ZERO3


def kept(optimizer: Any, params: Iterable[Tensor], where: dict[int, Slice]) -> dict[int, Tensor]:
    """Return, by the id of the parameter, gradients that stay in place after a step.

    Nobody clears them. Where no new gradient comes, the next step takes the old one again.
    """
    if not takes_from_parameters(optimizer):
        from deepspeed.utils import safe_get_local_grad

        return {id(param): safe_get_local_grad(param) for param in params if id(param) in where}
    if getattr(optimizer, "cpu_offload", False):
        here = ((key, s.stepped.grad, s) for key, s in where.items())
        return {key: grad.narrow(0, s.start, s.length) for key, grad, s in here if grad is not None}
    return {}


def _stage3(optimizer: Any) -> Slices:
    for group in optimizer.fp16_groups:
        for param in group:
            index, start, length = optimizer.grad_position[optimizer.get_param_id(param)]
            yield param, Slice(optimizer.fp32_partitioned_groups_flat[index], start, length)


def _flat(optimizer: Any) -> Slices:
    """What is in this rank's partition of each group; without ZeRO there is one of all."""
    groups, partitions = (getattr(optimizer, name) for name in _FLAT[kind_of(optimizer)])
    aligned = getattr(optimizer, "round_robin_bit16_offsets", None)  # 0.19.7
    for index, (params, partition) in enumerate(zip(groups, partitions, strict=True)):
        ranks = getattr(optimizer, "real_dp_process_group", None)
        begin = partition.numel() * (dist.get_rank(ranks[index]) if ranks else 0)
        sizes = (param.numel() for param in params)
        offsets = accumulate(sizes, initial=0) if aligned is None else aligned[index]
        for param, offset in zip(params, offsets, strict=False):
            start = max(int(offset), begin)
            end = min(int(offset) + param.numel(), begin + partition.numel())
            if start < end:
                yield param, Slice(partition, start - begin, end - start, start - int(offset))


def _unfused(optimizer: Any) -> Slices:
    for params, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for param, master in zip(params, masters, strict=True):
            yield param, Slice(master, 0, master.numel())


def _plain(optimizer: Any) -> Slices:
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield param, Slice(param, 0, param.numel())
