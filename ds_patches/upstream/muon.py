"""Muon: which gradients are its, and its update over those of a whole step at stage 3."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ds_patches.core.calls import Args, Wrapped, meanwhile
from ds_patches.upstream import zero3
from ds_patches.upstream.kinds import Kind, is_muon, kind_of

_STEPS = "_ds_patches_muon_steps"


# --- Stages 1 and 2: what the last backward of a step has reduced is orthogonalised then ----------


class Waiting(list[torch.Tensor]):
    """This rank's part of a group's gradients, and the whole matrices that it is a view of.

    call: the arguments for which upstream puts updates in its place.
    """

    def __init__(self, part: list[torch.Tensor], whole: list[torch.Tensor], call: Args) -> None:
        super().__init__(part)
        self.whole, self.call = whole, call


def wait_for_step(optimizer: Any, collect: Wrapped, params: Any, *rest: Any) -> list[torch.Tensor]:
    """Collect a group's part, which upstream makes updates of; here they are gradients."""
    group = rest[4]
    if vars(optimizer).get(_STEPS, False):
        found: list[torch.Tensor] = collect(params, *rest)
        return found
    whole = [gradient.contiguous() for gradient in optimizer.all_grad_tensors[group]]
    optimizer.all_grad_tensors[group] = whole
    inner = optimizer.optimizer  # by whose class it knows Muon
    another = SimpleNamespace(param_groups=inner.param_groups, state=inner.state)
    with meanwhile(optimizer, optimizer=another):
        return Waiting(collect(params, *rest), whole, (params, *rest))


def waits(optimizer: Any) -> bool:
    """Whether what was reduced can still be added to."""
    return any(isinstance(one, Waiting) for one in optimizer.averaged_gradients.values())


def to_add(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what adds up: of a matrix that lies on two ranks, all."""
    return gradients.whole if isinstance(gradients, Waiting) else gradients


def update_partitions(optimizer: Any) -> None:
    """Put updates in the place of what `wait_for_step` has collected."""
    vars(optimizer)[_STEPS] = True
    try:
        for group, found in [*optimizer.averaged_gradients.items()]:
            if isinstance(found, Waiting):
                optimizer.all_grad_tensors[group] = found.whole
                if hasattr(optimizer, "_muon_pending_momentum"):  # 0.19.7
                    optimizer._muon_pending_momentum.pop(group, None)
                optimizer.averaged_gradients[group] = optimizer.get_flat_partition(*found.call)
                optimizer.all_grad_tensors[group] = None
    finally:
        del vars(optimizer)[_STEPS]


def staged(optimizer: Any, group: int) -> torch.Tensor | None:
    """Return the momentum that a group is about to have. 0.19.7."""
    found = optimizer._muon_pending_momentum.get(group)
    return None if found is None else found[0]


def scale_of(optimizer: Any) -> float:
    """Return by what the step divides updates, which have no loss scale. 1: nothing is Muon's."""
    return float(optimizer.loss_scale) if is_muon(optimizer) else 1.0


def scaled(norm: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the norm of updates as if they had the loss scale. -1: they are not finite."""
    return torch.where(norm >= 0, norm * scale, norm)


def is_update(optimizer: Any, gradient: Any) -> bool:
    """Whether the flat gradient of a step of stages 1 and 2 is that of a group of matrices."""
    groups, flats = optimizer.optimizer.param_groups, optimizer.single_partition_of_fp32_groups
    return any(
        flat.grad is gradient and group["use_muon"]
        for flat, group in zip(flats, groups, strict=True)
    )


@torch.no_grad()
def update_matrices(inner: Any) -> None:
    """Put updates in the place of gradients, without ZeRO, whose partitions are no matrices."""
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    for group in (group for group in inner.param_groups if group["use_muon"]):
        methods = {"ns_method": group["ns_method"]} if "ns_method" in group else {}  # 0.19.0
        for param in (param for param in group["params"] if param.dim() > 1):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            if not inner.state[param]:
                inner.state[param]["momentum_buffer"] = torch.zeros_like(param)
            momentum = inner.state[param]["momentum_buffer"]
            update = muon_update(param.grad, momentum, beta=group["momentum"], **methods)
            param.grad.copy_(update.reshape(param.shape))


def is_matrix(name: str, param: Any) -> bool:
    """Whether DeepSpeed, from 0.18.1 on, means a parameter to be Muon's."""
    named = name.lower()
    return len(zero3.shape_of(param)) >= 2 and "embed" not in named and "lm_head" not in named


# --- Stage 3, 0.18.9 to 0.19.7: a bucket of gradients is orthogonalised when it is reduced --------


class _Whole:
    """A parameter with the gradient of a whole step, for upstream's update of a bucket."""

    def __init__(self, param: Any, gradient: torch.Tensor) -> None:
        self._param, self.grad = param, gradient

    def __getattr__(self, name: str) -> Any:
        return getattr(self._param, name)


def is_whole(optimizer: Any) -> bool:
    """Whether `update_step` has filled a bucket."""
    buckets = optimizer.ipg_buckets.values()
    return any(isinstance(one, _Whole) for bucket in buckets for one in bucket.params[:1])


def can_wait(optimizer: Any) -> bool:
    """Whether matrices can wait for the step: gradients on NVMe are not there."""
    return (
        optimizer.use_muon
        and kind_of(optimizer) is Kind.ZERO3
        and not optimizer.swap_optimizer
        and not optimizer.zenflow
    )


def update_step(optimizer: Any) -> None:
    """Put updates in the place of the gradients of a step. Collective."""
    found = [p for at, p in enumerate(optimizer.fp16_groups) if optimizer.sub_groups_using_muon[at]]
    ids = {param.ds_id for group in found for param in group}
    zero3.take_back(optimizer, ids)
    for group in found:
        for params in _alike(group, int(optimizer.reduce_bucket_size)):
            _update(optimizer, params)
    zero3.deliver(optimizer, ids)


def _alike(group: Sequence[Any], most: int) -> Iterator[list[Any]]:
    """Parameters of one shape: upstream exchanges those of a bucket in buffers of one."""
    for shape, params in groupby(sorted(group, key=_shape), _shape):
        alike, count = [*params], max(1, most // max(1, math.prod(shape)))
        for at in range(0, len(alike), count):
            yield alike[at : at + count]


def _shape(param: Any) -> tuple[int, ...]:
    return tuple(zero3.shape_of(param))


def _update(optimizer: Any, params: list[Any]) -> None:
    dtype = next(iter(optimizer.ipg_buckets))
    partitions = [zero3.gradient_partitions(optimizer)[param.ds_id].view(-1) for param in params]
    gathered = optimizer._partitioned_buffers_all_gather(params, partitions, dtype)
    buffer = torch.cat([gradient.reshape(-1) for gradient in gathered])
    parts = torch.split(buffer, [param.ds_numel for param in params])
    whole = [
        _Whole(param, part.view(zero3.shape_of(param)))
        for param, part in zip(params, parts, strict=True)
    ]
    with meanwhile(optimizer.ipg_buckets[dtype], params=whole):
        optimizer._apply_distributed_muon_update(dtype, buffer)
    for param, part, partition in zip(params, parts, partitions, strict=True):
        mine = part[dist.get_rank(zero3.group_of(param)) * partition.numel() :]
        mine = mine[: partition.numel()]
        partition[: mine.numel()].copy_(mine)
