"""The fp32 weights, states and gradients of DeepSpeed's optimizers, by parameter."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_patches.core.errors import NotChecked
from ds_patches.upstream.classes import BF16, FP16, FP16_UNFUSED, ZERO3, ZERO12, class_of


class Slice(NamedTuple):
    """The place of a parameter, or of this rank's part of it, in a tensor that is stepped.

    start, length: elements of `stepped`.
    skipped: elements of the parameter that precede this part, and belong to other ranks.
    """

    param: Any
    stepped: Tensor
    start: int
    length: int
    skipped: int = 0


def slices(optimizer: Any) -> dict[int, Slice]:
    """Return this rank's slices by the id of the parameter; other ranks' parameters have none.

    Raises NotChecked for an optimizer of another layout.
    """
    kind = class_of(optimizer)
    slices_of = _flat if kind in _FLAT else {ZERO3: _stage3, FP16_UNFUSED: _unfused}.get(kind)
    if slices_of is None and isinstance(optimizer, torch.optim.Optimizer):
        slices_of = _plain
    settings = [name for name in _UNSUPPORTED if getattr(optimizer, name, False)]
    if slices_of is None or settings:
        name = ", ".join([type(optimizer).__name__, *settings])
        raise NotChecked(f"train_check() does not cover {name}")
    return {id(part.param): part for part in slices_of(optimizer)}


def weight_pair(part: Slice) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a parameter in the model, and in the optimizer's weights.

    Two views of one shape; their dtypes may differ.
    """
    weights = getattr(part.param, "ds_tensor", part.param).detach().reshape(-1)
    weights, stepped = weights.narrow(0, part.skipped, part.length), part.stepped.detach()
    if stepped.dim() != 1:  # not flattened: one tensor for this parameter
        return weights.view(stepped.shape), stepped
    return weights, stepped.narrow(0, part.start, part.length)


#: By optimizer with flattened groups: its lists of parameters and of fp32 partitions.
_FLAT = {
    ZERO12: ("round_robin_bit16_groups", "single_partition_of_fp32_groups"),
    BF16: ("bf16_groups", "fp32_groups_flat_partition"),
    FP16: ("fp16_groups", "fp32_groups_flat"),
}
#: Settings with which an optimizer does not read its gradients from `.grad`, or swaps them.
_UNSUPPORTED = ("fused_adam_legacy", "fused_lamb_legacy", "zenflow", "swap_optimizer")


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the PyTorch optimizers that do the step."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    backup = getattr(optimizer, "backup_optimizer", None)  # with partly offloaded states
    return [optimizer.optimizer, *([backup] if backup is not None else [])]


def keeps_gradients(optimizer: Any) -> bool:
    """Return True if gradients stay in place after a step, and the next step may use them again."""
    return class_of(optimizer) == ZERO3 or bool(getattr(optimizer, "cpu_offload", False))


def slice_at_stage3(optimizer: Any, param: Any) -> Slice:
    """Return the place of this rank's partition of a parameter in the fp32 weights."""
    index, start, length = optimizer.grad_position[optimizer.get_param_id(param)]
    return Slice(param, optimizer.fp32_partitioned_groups_flat[index], start, length)


def _stage3(optimizer: Any) -> Iterator[Slice]:
    for group in optimizer.fp16_groups:
        for param in group:
            yield slice_at_stage3(optimizer, param)


def _flat(optimizer: Any) -> Iterator[Slice]:
    """Yield the parameters in this rank's partition of each group; all of them without ZeRO."""
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
                yield Slice(param, partition, start - begin, end - start, start - int(offset))


def _unfused(optimizer: Any) -> Iterator[Slice]:
    for params, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for param, master in zip(params, masters, strict=True):
            yield Slice(param, master, 0, master.numel())


def _plain(optimizer: Any) -> Iterator[Slice]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield Slice(param, param, 0, param.numel())


# --- Stages 1 and 2, and bf16 parameters with fp32 gradients, in all releases ---------------------


def hp_mappings(optimizer: Any, groups: str) -> list[tuple[Any, Any]]:
    """Return each parameter's high-precision mapping, and the fp32 weights of its group.

    groups: the name of the optimizer's list of groups. Other ranks' parameters are left out.
    """
    pairs = zip(optimizer.optimizer.param_groups, getattr(optimizer, groups), strict=False)
    return [
        (param._hp_mapping, group["params"][0])
        for group, params in pairs
        for param in params
        if param._hp_mapping is not None
    ]


def expose_gradient_sums(optimizer: Any) -> None:
    """Make ``safe_get_full_grad`` return the step's gradient, which is the sum over micro steps.

    For bf16 parameters with fp32 gradients. A backward leaves the rank's own last gradient in
    ``param.grad``, which is read first, to 0.19.7; and each rank holds whole sums, not its part.
    """
    if getattr(optimizer, "graph_harvesting", False):
        return  # to 0.19.7; CUDA graphs hold the gradients' addresses
    gradients, sums = optimizer.fp32_groups_gradient_dict, optimizer.fp32_groups_gradients
    for group, params in enumerate(optimizer.bf16_groups):
        if gradients[group] is sums[group]:  # as DeepSpeed set it
            gradients[group] = [None] * len(params)
            for param, whole in zip(params, sums[group], strict=True):
                if param._hp_mapping is not None:
                    part = param._hp_mapping.lp_fragment_address
                    partition = whole.view(-1).narrow(0, part.start, part.numel)
                    gradients[group][param._index_in_param_group] = partition
        for param in params:
            param.grad = None
