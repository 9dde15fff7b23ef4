"""Muon orthogonalises whole matrices, and the gradient of the whole step, at every stage.

Use
    Apply it before ``deepspeed.initialize``, and leave the script as it is. What stock gets wrong:

    | where | what | releases | patched |
    |---|---|---|---|
    | ZeRO 1 and 2 | a matrix that lies on two ranks gets another update | to 0.19.2 | right |
    | ZeRO 1 and 2 | all matrices but a group's last lose their momentum | 0.19.7 | right |
    | ZeRO 1 and 2 | two backwards: the last counts | all | right, with ``accumulation`` |
    | ZeRO 2 | micro steps: the last counts | to 0.18.2 | right, with ``accumulation`` |
    | fp16, ZeRO 1 and 2 | after an overflow no step is ever taken | to 0.19.6 | right |
    | fp16, ZeRO 1, 2, 3 | updates are divided by the loss scale | to 0.19.7 | right |
    | ZeRO 3 | micro steps: each is orthogonalised | 0.18.9 to 0.19.7 | right |
    | ZeRO 3 | matrices of two shapes: an error, or wrong | 0.18.9 to 0.19.7 | right |
    | ZeRO 3, ``zero.Init`` | everything trains with Adam | 0.18.9 to 0.19.6 | right |
    | ZeRO 0 | plain SGD; to 0.18.4 with bf16 and fp32 sums at ZeRO 1, too | to 0.19.6 | right |
    | ZeRO 1 and 2, ``offload_optimizer`` | plain SGD | to 0.19.7 | a warning |
    | ZeRO 1, bf16 with fp32 sums | plain SGD | 0.18.5 to 0.19.6 | a warning |
    | ZeRO 3, Muon that the script made | plain SGD | to 0.18.8 | a warning |
    | ZeRO 1 and 2, experts | a matrix on two ranks, as above | to 0.19.2 | a warning |
    | ZeRO 3, optimizer on NVMe | micro steps: each is orthogonalised | to 0.19.7 | a warning |

    From 0.19.0 to 0.19.7 gradients above 65,504 are infinite without ``"ns_method": "standard"``.
    Every release clips updates as if they were gradients.

Risks
    - Where stock's updates were wrong, a resumed run goes on with other updates than it began with.
    - Apply it and take it back between two steps, not after a backward.
    - ``safe_set_full_grad`` sets a gradient; on stock it set an update. If a matrix lies on two
      ranks at ZeRO 1 and 2, each sets its own part.
    - An iteration in bf16 (all, to 0.18.9) magnifies rounding: weights after two backwards were up
      to 0.24 off those after one over the sum, without an engine 0.12; in fp64 2e-5.

Cost
    ZeRO 1 and 2: gradients of the matrices are kept until the step, in the place of stock's
    updates. Up to 0.19.2 ``reduce_scatter`` is off. ZeRO 3: one more gather in a step for matrices
    of one shape, and none of Muon's exchanges in micro steps.

Why
    Muon has to orthogonalise a whole matrix, and the whole gradient of a step: updates of parts do
    not add up to the update of the whole.

How
    Every rank gets whole averaged gradients. Upstream's update runs in the step, after the check
    for overflow and before the norm. Up to 0.19.7 it is multiplied by the loss scale, because the
    step divides by it.

Upstream
    Pull requests 8090, 8141 (0.19.3), 8432, 8435, 8438, 8442 (0.19.7), 8600 (0.19.8), issue 8443.
"""

from __future__ import annotations

import logging
from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Class, Patch, Target, upstream
from ds_patches.upstream.kinds import is_muon
from ds_patches.upstream.places import BF16, ZERO3, ZERO12

_INNER = Class("deepspeed.runtime.zero.muon.muon_optimizer", "MuonWithAuxAdam")
_ZERO3 = ">=0.18.9,<=0.19.7"

PATCH = Patch(
    name="muon",
    hooks=__name__,
    summary="Muon orthogonalises whole matrices, once a step, at every stage",
    remove_when="a release adds up two backwards with Muon",
    upstream=upstream("PR 8141", "PR 8435", "PR 8438", "PR 8442", "PR 8600", "issue 8443"),
    supported=">=0.17.6,<=0.19.8",
    targets=(
        ZERO12.target("__init__", "around_zero12", ">=0.17.6,<=0.19.2"),
        ZERO12.target("__init__", "around_offloaded", ">=0.19.3,<=0.19.7"),
        ZERO12.target("get_flat_partition", "around_partition", ">=0.17.6"),
        ZERO12.target("scaled_global_norm", "around_taken", ">=0.17.6,<=0.19.6"),
        ZERO12.target("_commit_muon_momentum", "around_taken", ">=0.19.7"),
        ZERO12.target("_muon_staging_momentum", "around_staging", ">=0.19.7,<=0.19.7"),
        ZERO12.target("get_grad_norm_direct", "around_norm", ">=0.17.6,<=0.19.7"),
        ZERO12.target("unscale_and_clip_grads", "around_unscale", ">=0.17.6,<=0.19.7"),
        BF16.target("__init__", "around_flat", ">=0.18.5,<=0.19.6"),
        ZERO3.target("__init__", "around_zero3", ">=0.17.6,<=0.19.7"),
        ZERO3.target("_apply_distributed_muon_update", "around_bucket", _ZERO3),
        ZERO3.target("_get_norm_groups", "around_norms", _ZERO3),
        ZERO3.target("unscale_and_clip_grads", "around_sub_group", _ZERO3),
        _INNER.target("step", "around_step", ">=0.17.6,<=0.19.6"),
        Target("deepspeed", "set_optimizer_flags", "around_flags", ">=0.18.9,<=0.19.6"),
    ),
    dependencies=(ZERO3.needs("_partitioned_buffers_all_gather", "gathers gradients", _ZERO3),),
)

apply, unapply, is_applied = api.of(__name__)

logger = logging.getLogger("ds_patches.muon")

_SGD = "Muon is plain SGD %s in this DeepSpeed, and no patch cures it: take 0.19.8, or %s."


# --- Stages 1 and 2 -------------------------------------------------------------------------------


def around_zero12(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> None:
    """Its ranks get the part of a matrix that they step, and orthogonalise that with zeros."""
    around_offloaded(wrapped, optimizer, args, kwargs)
    if not is_muon(optimizer) or not optimizer.reduce_scatter:
        return
    if optimizer.has_moe_layers:  # which are right with reduce_scatter alone
        logger.warning(
            "Muon updates a matrix that lies on two ranks wrongly, and with experts no patch cures "
            "it: take DeepSpeed 0.19.3 or later."
        )
    else:
        optimizer.reduce_scatter = False


def around_offloaded(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> None:
    """DeepSpeed makes an optimizer of stage 1 or 2 in which Muon is SGD: a warning."""
    wrapped(*args, **kwargs)
    if is_muon(optimizer) and optimizer.cpu_offload:
        logger.warning(_SGD, "with offload_optimizer at ZeRO 1 and 2", "leave the optimizer there")


def around_partition(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed orthogonalises what a backward has reduced, if the next may be that of the step."""
    params = args[0] if args else in_order(wrapped, args, kwargs)[0]
    if not params or not getattr(params[0], "use_muon", False) or not is_muon(optimizer):
        return wrapped(*args, **kwargs)
    from ds_patches.upstream import muon

    return muon.wait_for_step(optimizer, wrapped, *in_order(wrapped, args, kwargs))


def around_taken(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Asked by a step that is taken: no gradient has overflowed."""
    from ds_patches.upstream import muon

    if is_muon(optimizer):
        muon.update_partitions(optimizer)
    return wrapped(*args, **kwargs)


def around_staging(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed stages a whole group for each matrix, over what others have written; here once."""
    from ds_patches.upstream import muon

    staged = muon.staged(optimizer, in_order(wrapped, args, kwargs)[1])
    return wrapped(*args, **kwargs) if staged is None else staged


def around_norm(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Gradients of a group have the loss scale; updates have none."""
    from ds_patches.upstream import muon

    norm = wrapped(*args, **kwargs)
    if (scale := muon.scale_of(optimizer)) == 1:
        return norm
    params = in_order(wrapped, args, kwargs)[1]
    return muon.scaled(norm, scale) if params and getattr(params[0], "use_muon", False) else norm


def around_unscale(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed divides by the loss scale here, and clips."""
    from ds_patches.upstream import muon

    if (scale := muon.scale_of(optimizer)) != 1 and not optimizer.cpu_offload:
        for gradient in in_order(wrapped, args, kwargs)[0]:
            if muon.is_update(optimizer, gradient):
                gradient.data.mul_(scale)
    return wrapped(*args, **kwargs)


def around_flat(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> None:
    """For half precision with fp32 sums DeepSpeed knows nothing of Muon here."""
    wrapped(*args, **kwargs)
    if is_muon(optimizer):
        logger.warning(_SGD, "at ZeRO 1 with bf16 and fp32 sums", "take ZeRO 2")


# --- Stage 3 --------------------------------------------------------------------------------------


def around_zero3(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> None:
    """DeepSpeed makes an optimizer of stage 3: where Muon is SGD, a warning."""
    from ds_patches.upstream import muon

    wrapped(*args, **kwargs)
    if is_muon(optimizer) and not hasattr(optimizer, "use_muon"):  # before 0.18.9
        logger.warning(_SGD, "at ZeRO 3", "take ZeRO 2")
    elif is_muon(optimizer) and not muon.can_wait(optimizer):
        logger.warning(
            "Muon orthogonalises each micro step by itself with an optimizer on NVMe, and no patch "
            "cures it: take DeepSpeed 0.19.8, or gradient_accumulation_steps 1."
        )


def around_bucket(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> None:
    """DeepSpeed would orthogonalise what this micro step has reduced."""
    from ds_patches.upstream import muon

    if not muon.can_wait(optimizer) or muon.is_whole(optimizer):
        wrapped(*args, **kwargs)


def around_norms(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Asked by a step that is taken, before its gradients are clipped."""
    from ds_patches.upstream import muon

    if muon.can_wait(optimizer):
        muon.update_step(optimizer)
    norms = wrapped(*args, **kwargs)
    if (scale := muon.scale_of(optimizer)) == 1:
        return norms
    both = zip(norms, optimizer.sub_groups_using_muon, strict=True)
    return [muon.scaled(norm, scale) if whole else norm for norm, whole in both]


def around_sub_group(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed divides by the loss scale here, and clips."""
    from ds_patches.upstream import muon

    group = in_order(wrapped, args, kwargs)[0]
    if (scale := muon.scale_of(optimizer)) != 1 and optimizer.sub_groups_using_muon[group]:
        optimizer.fp32_partitioned_groups_flat[group].grad.mul_(scale)
    return wrapped(*args, **kwargs)


def around_flags(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> None:
    """DeepSpeed sorts parameters for Muon by their dimensions; here also under ``zero.Init``."""
    from ds_patches.upstream import muon, zero3

    wrapped(*args, **kwargs)
    settings, model = in_order(wrapped, args, kwargs)
    if (settings.optimizer_name or "").lower() != "muon":
        return
    for name, param in model.named_parameters():
        if zero3.is_partitioned(param):
            param.use_muon = muon.is_matrix(name, param)


# --- Stage 0 --------------------------------------------------------------------------------------


def around_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """The inner step takes gradients for updates, which only ZeRO has made of them."""
    from ds_patches.upstream import muon

    if not (args or kwargs):  # a closure, whose gradients are not there yet
        muon.update_matrices(optimizer)
    return wrapped(*args, **kwargs)
