"""What DeepSpeed's optimizers step with, by parameter; the only place that knows their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_patches.traincheck.report import NotChecked


class Slice(NamedTuple):
    """Where a parameter, or this rank's part of it, lies in a tensor that is stepped."""

    stepped: Tensor
    start: int
    length: int


def slices(optimizer: Any) -> dict[int, Slice]:
    """Return this rank's slices by the id of the parameter; one that lies elsewhere has none.

    Raises NotChecked for an optimizer that is not known to step with these.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    # Exact types: a subclass, as ZenFlow's, steps in a way of its own.
    known = {
        DeepSpeedZeroOptimizer_Stage3: _stage3,
        DeepSpeedZeroOptimizer: _stage1_and_2,
        BF16_Optimizer: _bf16,
        FP16_Optimizer: _fp16,
        FP16_UnfusedOptimizer: _fp16_unfused,
    }
    found = known.get(type(optimizer))
    if found is None and isinstance(optimizer, torch.optim.Optimizer):
        found = _plain
    past = [name for name in _PAST_GRAD if getattr(optimizer, name, False)]
    if found is None or past:
        name = ", ".join([type(optimizer).__name__, *past])
        raise NotChecked(f"train_check() does not cover {name}")
    return {id(param): where for param, where in found(optimizer)}


#: Such an optimizer does not find its gradients in `.grad`, or swaps them.
_PAST_GRAD = ("fused_adam_legacy", "fused_lamb_legacy", "zenflow", "swap_optimizer")


def stepping(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the PyTorch optimizers that do the step."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    backup = getattr(optimizer, "backup_optimizer", None)  # of partly offloaded states
    return [optimizer.optimizer, *([backup] if backup is not None else [])]


def kept(optimizer: Any, params: Iterable[Tensor], where: dict[int, Slice]) -> dict[int, Tensor]:
    """Return, by the id of the parameter, gradients that stay in place after a step.

    Nobody clears them. Where no new gradient comes, the next step takes the old one again.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        from deepspeed.utils import safe_get_local_grad

        return {id(param): safe_get_local_grad(param) for param in params if id(param) in where}
    if getattr(optimizer, "cpu_offload", False):
        here = ((key, s.stepped.grad, s) for key, s in where.items())
        return {key: grad.narrow(0, s.start, s.length) for key, grad, s in here if grad is not None}
    return {}


def reduction_group(engine: Any) -> Any:
    """Return the ranks that share gradients."""
    return getattr(engine, "seq_data_parallel_group", None) or engine.data_parallel_group


Slices = Iterator[tuple[Tensor, Slice]]


def _stage3(optimizer: Any) -> Slices:
    for group in optimizer.fp16_groups:
        for param in group:
            index, start, length = optimizer.grad_position[optimizer.get_param_id(param)]
            yield param, Slice(optimizer.fp32_partitioned_groups_flat[index], start, length)


def _stage1_and_2(optimizer: Any) -> Slices:
    aligned = getattr(optimizer, "round_robin_bit16_offsets", None)  # 0.19.7
    for index, params in enumerate(optimizer.round_robin_bit16_groups):
        rank = dist.get_rank(optimizer.real_dp_process_group[index])
        partition = optimizer.single_partition_of_fp32_groups[index]
        yield from _flat(params, partition, rank, None if aligned is None else aligned[index])


def _bf16(optimizer: Any) -> Slices:
    for index, params in enumerate(optimizer.bf16_groups):
        rank = dist.get_rank(optimizer.real_dp_process_group[index])
        yield from _flat(params, optimizer.fp32_groups_flat_partition[index], rank)


def _fp16(optimizer: Any) -> Slices:
    for params, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
        yield from _flat(params, flat, 0)


def _fp16_unfused(optimizer: Any) -> Slices:
    for params, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for param, master in zip(params, masters, strict=True):
            yield param, Slice(master, 0, master.numel())


def _plain(optimizer: Any) -> Slices:
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield param, Slice(param, 0, param.numel())


def _flat(params: Any, partition: Tensor, rank: int, offsets: Any = None) -> Slices:
    """Of parameters that lie flat, one behind the other, what is in partition number `rank`."""
    begin = rank * partition.numel()
    if offsets is None:
        offsets = accumulate((param.numel() for param in params), initial=0)
    for param, offset in zip(params, offsets, strict=False):
        start = max(int(offset), begin)
        end = min(int(offset) + param.numel(), begin + partition.numel())
        if start < end:
            yield param, Slice(partition, start - begin, end - start)
