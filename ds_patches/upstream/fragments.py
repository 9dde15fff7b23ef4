"""The fp32 weights, states and gradients that DeepSpeed's optimizers step with, by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_patches.core.errors import NotChecked
from ds_patches.upstream.classes import BF16, FP16, FP16_UNFUSED, ZERO3, ZERO12, class_of


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
    kind = class_of(optimizer)
    slices_of = _flat if kind in _FLAT else {ZERO3: _stage3, FP16_UNFUSED: _unfused}.get(kind)
    if slices_of is None and isinstance(optimizer, torch.optim.Optimizer):
        slices_of = _plain
    past = [name for name in _PAST_GRAD if getattr(optimizer, name, False)]
    if slices_of is None or past:
        name = ", ".join([type(optimizer).__name__, *past])
        raise NotChecked(f"train_check() does not cover {name}")
    return slices_of(optimizer)


def both(param: Any, where: Slice) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a parameter as forwards use it, and as the optimizer steps it."""
    part = getattr(param, "ds_tensor", param).detach().reshape(-1)
    part, stepped = part.narrow(0, where.skipped, where.length), where.stepped.detach()
    if stepped.dim() != 1:  # of a parameter by itself, laid out as that is
        return part.view(stepped.shape), stepped
    return part, stepped.narrow(0, where.start, where.length)


#: Where parameters lie flat, one behind the other: of each group the parameters, and a partition.
_FLAT = {
    ZERO12: ("round_robin_bit16_groups", "single_partition_of_fp32_groups"),
    BF16: ("bf16_groups", "fp32_groups_flat_partition"),
    FP16: ("fp16_groups", "fp32_groups_flat"),
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
    """Return True if a step may read gradients on the parameters; ZeRO-3's never does."""
    return class_of(optimizer) != ZERO3


def kept(optimizer: Any, params: Iterable[Tensor], where: dict[int, Slice]) -> dict[int, Tensor]:
    """Return, by the id of the parameter, gradients that stay in place after a step.

    Nobody clears them. Where no new gradient comes, the next step takes the old one again.
    """
    if not takes_from_parameters(optimizer):
        from deepspeed.utils import safe_get_local_grad

        return {id(param): safe_get_local_grad(param) for param in params if id(param) in where}
    if getattr(optimizer, "cpu_offload", False):
        grads = ((key, s.stepped.grad, s) for key, s in where.items())
        return {k: grad.narrow(0, s.start, s.length) for k, grad, s in grads if grad is not None}
    return {}


def slice_at_stage3(optimizer: Any, param: Any) -> Slice:
    """Return where this rank's partition of a parameter is stepped."""
    index, start, length = optimizer.grad_position[optimizer.get_param_id(param)]
    return Slice(optimizer.fp32_partitioned_groups_flat[index], start, length)


def _stage3(optimizer: Any) -> Slices:
    for group in optimizer.fp16_groups:
        for param in group:
            yield param, slice_at_stage3(optimizer, param)


def _flat(optimizer: Any) -> Slices:
    """What is in this rank's partition of each group; without ZeRO there is one of all."""
    groups, partitions = (getattr(optimizer, name) for name in _FLAT[class_of(optimizer)])
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


# --- Stages 1 and 2, and bf16 parameters with fp32 gradients, in all releases ---------------------


def mappings(optimizer: Any, groups: str) -> list[tuple[Any, Any]]:
    """Return what maps each parameter to its part, and the fp32 weights of its group.

    groups: the name of the optimizer's list of groups. Parameters of other ranks are left out.
    """
    pairs = zip(optimizer.optimizer.param_groups, getattr(optimizer, groups), strict=False)
    return [
        (param._hp_mapping, group["params"][0])
        for group, params in pairs
        for param in params
        if param._hp_mapping is not None
    ]


def read_sums(optimizer: Any) -> None:
    """Let a gradient that is asked for be that of the step: the sum, of which ranks have parts.

    Of bf16 parameters with fp32 gradients. A backward leaves its own rank's last gradient there,
    which is found first (to read one, to 0.19.7), and the sums are found whole.
    """
    if getattr(optimizer, "graph_harvesting", False):  # to 0.19.7; its gradients may not move
        return
    kept, sums = optimizer.fp32_groups_gradient_dict, optimizer.fp32_groups_gradients
    for group, params in enumerate(optimizer.bf16_groups):
        if kept[group] is sums[group]:  # as upstream left them
            kept[group] = [None] * len(params)
            for param, whole in zip(params, sums[group], strict=True):
                if param._hp_mapping is not None:
                    part = param._hp_mapping.lp_fragment_address
                    own = whole.view(-1).narrow(0, part.start, part.numel)
                    kept[group][param._index_in_param_group] = own
        for param in params:
            param.grad = None
