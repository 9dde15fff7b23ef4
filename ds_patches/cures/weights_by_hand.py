"""Weights that a script changes between steps: loaded, reinitialised, clamped."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ds_patches.core import api, engines, log
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.errors import NotChecked
from ds_patches.core.layer import Layer
from ds_patches.core.patch import Dependency, Patch
from ds_patches.steps.attached import Attached
from ds_patches.upstream.classes import ENGINE, GATHERED, OPTIMIZERS, ZERO3, class_of

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("ds_patches.weights_by_hand")

_NOTHING_TRAINABLE = (
    "No parameter of the optimizer requires a gradient, so ZeRO raises in deepspeed.initialize: "
    "IndexError, AssertionError or ValueError. Call requires_grad_() before it; or, if the model "
    "is not to train, call initialize without an optimizer, or do not call it."
)
_OUTSIDE_MODEL = (
    "The optimizer has %d trainable parameters that are not in the model of deepspeed.initialize, "
    "of shape %s. Their gradients are not reduced, so they drift apart on the ranks; with ZeRO "
    "initialize raises KeyError or AttributeError. Freeze them by requires_grad_(False) before the "
    "optimizer is made, as for the guide of GISTEmbedLoss; or put them into the model, as for the "
    "classifier of SoftmaxLoss."
)
_UNFROZEN = (
    "These parameters were frozen in deepspeed.initialize and unfrozen after it, and no step "
    "trains them: %s. Call initialize again after unfreezing them; or leave them unfrozen in "
    "initialize, and set the learning rate of their group to 0 until they are to train."
)
_FROZEN = (
    "These parameters were frozen after deepspeed.initialize, and steps still change them, by "
    "momentum and weight decay: %s. Set the learning rate of their group to 0, or call initialize "
    "again."
)
_FRAGMENTS = "deepspeed.utils.tensor_fragment"
_version_of = attrgetter("_version")

PATCH = Patch(
    name="weights_by_hand",
    summary="weights that a script changes between steps stay changed: loaded, clamped, averaged",
    remove_when="a release steps from weights that a script changed; none up to 0.19.8 does",
    supported=">=0.16.0,<=0.19.8",
    targets=(
        ENGINE.target("_configure_optimizer", "around_configure"),
        ENGINE.target("_do_optimizer_sanity_check", "around_wrapping"),
        ENGINE.target("_take_model_step", "around_step"),
        GATHERED.target("__exit__", "around_exit"),
        ZERO3.target("set_full_hp_param", "around_set"),
        ZERO3.target("set_local_hp_param", "around_set_part"),
        *(optimizer.target("load_state_dict", "around_load_state") for optimizer in OPTIMIZERS),
    ),
    dependencies=(
        Dependency(_FRAGMENTS, "safe_set_full_fp32_param", "calls a method of the parameter"),
        Dependency(_FRAGMENTS, "set_full_hp_param", "is the method at ZeRO 1 and 2"),
    ),
    activate="activate",
    deactivate="deactivate",
)

apply, unapply, is_applied = api.of(__name__)

#: Settings of a parameter group with which an optimizer changes a parameter whose gradient is zero.
_MOVING = ("betas", "momentum", "weight_decay")
#: An optimizer's parameters by id: with their group, and `requires_grad` at ``initialize``.
_Params = dict[int, tuple[Any, Any, bool]]
#: The number of writes that is assumed in a block of ``GatheredParameters``, which counts none.
_SEVERAL = 2


class _Weights:
    """The model's weights as of the last step of an optimizer that has fp32 copies of them.

    before: at ZeRO-3, parameters gathered with a modifier rank since, and their old partitions.
    setters: at ZeRO 1 and 2, wrappers of the methods by which scripts set the fp32 weights.
    """

    def __init__(self, params: list[Any]) -> None:
        self._params = params
        self.before: dict[int, tuple[Any, Tensor]] = {}
        self.setters: list[Layer] = []
        self.reset()

    def reset(self) -> None:
        """Record that the script has changed no weights since DeepSpeed wrote them."""
        self._versions = [*map(_version_of, self._params)]
        self.before.clear()

    def record(self, params: list[Any]) -> None:
        """Copy the partitions of trainable parameters, once between two steps."""
        for param in params:
            if param.requires_grad and id(param) not in self.before:
                self.before[id(param)] = param, param.ds_tensor.detach().clone()

    def copy_changed(self, optimizer: Any) -> None:
        """Copy weights that changed since the last step into the fp32 weights."""
        if not self.before and [*map(_version_of, self._params)] == self._versions:
            return
        from ds_patches.upstream import fragments

        slices = fragments.slices(optimizer)
        for param, before, writes in self._changed():
            if (part := slices.get(id(param))) is None:  # another rank's
                continue
            weights, fp32 = fragments.weight_pair(part)
            weights = weights.to(fp32.device)
            rounded = fp32.to(weights.dtype)
            is_changed = ~_is_equal(weights, rounded, writes)
            if before is not None:  # fp32 weights that the script has set since are newer
                before = before.to(fp32.device).view(-1)[: weights.numel()]
                is_changed &= _is_equal(rounded, before)
            fp32.copy_(weights.to(fp32.dtype).where(is_changed, fp32))

    def _changed(self) -> Iterator[tuple[Any, Tensor | None, int]]:
        """Yield each written parameter, its old partition if recorded, and the number of writes."""
        for param, before in self.before.values():
            yield param, before, _SEVERAL
        for param, version in zip(self._params, self._versions, strict=True):
            if param._version != version:
                yield param, None, param._version - version


def _is_equal(weights: Tensor, other: Tensor, writes: int = 1) -> Tensor:
    """Return True for equal elements; after several writes, up to one rounding of the dtype."""
    import torch

    tolerance = torch.finfo(weights.dtype).eps if writes > 1 else 0.0
    return torch.isclose(weights, other, rtol=tolerance, atol=0.0, equal_nan=True)


def _params_of(engine: Any) -> _Params:
    """Return the parameters that an engine's optimizer was built with.

    Without those of no elements, which zero12_gradients freezes.
    """
    groups = engine.basic_optimizer.param_groups
    params = ((param, group) for group in groups for param in group["params"])
    return {
        id(param): (param, group, param.requires_grad)
        for param, group in params
        if getattr(param, "ds_numel", param.numel())
    }


_optimizer_params: Attached[_Params] = Attached(f"{PATCH.name}_params", _params_of)


def _weights_of(optimizer: Any) -> _Weights | None:
    """Return the weights of an optimizer, as of its last step; None if they are not known."""
    from ds_patches.upstream import fragments

    if getattr(optimizer, "params_in_nvme_and_cpu", False):  # the weights are in files
        return None
    try:
        params = [part.param for part in fragments.slices(optimizer).values()]
    except NotChecked:
        return None
    return _Weights([] if class_of(optimizer) == ZERO3 else params)


_weights: Attached[_Weights] = Attached(PATCH.name, _weights_of)


def _track(engine: Any) -> None:
    """Record an engine's weights, and wrap the setters of its parameters' fp32 weights."""
    if class_of(engine.optimizer) in OPTIMIZERS:
        weights = _weights(engine.optimizer)
        if weights is not None and not weights.setters:
            weights.setters = [
                Layer(param, "set_full_hp_param", partial(_around_setter, param))
                for param in engine.module.parameters()
                if hasattr(param, "set_full_hp_param")
            ]


def activate() -> Sequence[str]:
    """Track the engines that were built before."""
    for engine in [*engines.known]:
        _track(engine)
    return []


def deactivate() -> None:
    """Remove the recorded weights and the setters' wrappers from every engine."""
    for _, weights in _weights.detach_all():
        for setter in weights.setters:
            setter.remove()
    _optimizer_params.detach_all()


def around_configure(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record the weights when DeepSpeed has built the optimizer with fp32 copies of them."""
    result = wrapped(*args, **kwargs)
    _track(engine)
    return result


def around_wrapping(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Warn about the optimizer's parameters, before ZeRO's wrapper replaces them."""
    result = wrapped(*args, **kwargs)
    params = _optimizer_params(engine) or {}
    trained = {key: param for key, (param, _, is_trained) in params.items() if is_trained}
    if engine.zero_optimization() and not trained:
        logger.log(log.level_for_the_job(), _NOTHING_TRAINABLE)
    for param in engine.module.parameters():
        trained.pop(id(param), None)
    if trained:
        shapes = [str(tuple(getattr(p, "ds_shape", p.shape))) for p in trained.values()]
        logger.log(log.level_for_the_job(), _OUTSIDE_MODEL, len(shapes), log.named(shapes))
    return result


def around_step(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Copy changed weights to the fp32 weights, which the step would write over them."""
    weights = _weights.get(engine.optimizer)
    if weights is None:
        return wrapped(*args, **kwargs)
    if params := _optimizer_params.get(engine):
        _warn_of_frozen(engine, params)
    weights.copy_changed(engine.optimizer)
    result = wrapped(*args, **kwargs)
    weights.reset()
    return result


def _warn_of_frozen(engine: Any, params: _Params) -> None:
    """Warn once about each parameter that was frozen or unfrozen after ``initialize``."""
    changed = [entry for entry in params.values() if entry[0].requires_grad != entry[2]]
    if not changed:
        return
    from ds_patches.upstream import fragments
    from ds_patches.upstream.classes import is_fp16_wrapper

    name_of = {id(param): name for name, param in engine.module.named_parameters()}
    # Half precision optimizers up to 0.18 also copy and train frozen parameters, once unfrozen.
    copied = fragments.slices(engine.optimizer) if is_fp16_wrapper(engine.optimizer) else {}
    names_by: dict[str, list[str]] = {_UNFROZEN: [], _FROZEN: []}
    for param, group, was_trained in changed:
        is_updated = group["lr"] and any(map(group.get, _MOVING))
        if is_updated if was_trained else id(param) not in copied:
            name = name_of.get(id(param), "one outside the model")
            names_by[_FROZEN if was_trained else _UNFROZEN].append(name)
            del params[id(param)]
    for message, names in names_by.items():
        if names:
            logger.log(log.level_for_the_job(), message, log.named(names))


def around_exit(wrapped: Wrapped, gathered: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record the old partitions before ``GatheredParameters`` partitions a rank's changes."""
    if gathered.enabled and gathered.src_rank is not None:
        from ds_patches.upstream.zero3 import optimizers_of

        for optimizer in optimizers_of(gathered):
            if (weights := _weights.get(optimizer)) is not None:
                weights.record(gathered.params)
    return wrapped(*args, **kwargs)


def _around_setter(param: Any, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    """Copy the fp32 weights that a script sets into the parameter, at ZeRO 1 and 2."""
    result = wrapped(*args, **kwargs)
    value, *state = in_order(wrapped, args, kwargs)
    if not any(state):  # else the script sets an optimizer state
        # By `data`, as `copy_changed` would take another write for the script's.
        param.data.copy_(value.reshape(param.shape))
    return result


def around_set_part(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Copy fp32 weights set by ``safe_set_local_fp32_param`` into the partition."""
    return around_set(wrapped, optimizer, args, kwargs, is_whole=False)


def around_set(
    wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs, is_whole: bool = True
) -> Any:
    """Copy fp32 weights set by ``safe_set_full_fp32_param`` into the partition."""
    result = wrapped(*args, **kwargs)
    value, param, *state = in_order(wrapped, args, kwargs)
    if any(state) or not param.requires_grad or _weights.get(optimizer) is None:
        return result  # the script sets an optimizer state, or the weights are not tracked
    from ds_patches.upstream import fragments, zero3

    partition, fp32 = fragments.weight_pair(fragments.slice_at_stage3(optimizer, param))
    partition.copy_(fp32)
    zero3.drop_secondary(param)
    if is_whole and zero3.is_available(param):  # persistent parameters stay gathered
        param.data.copy_(value.reshape(param.shape))
    return result


def around_load_state(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record the weights that DeepSpeed loads from a checkpoint together with the fp32 ones."""
    result = wrapped(*args, **kwargs)
    if (weights := _weights.get(optimizer)) is not None:
        weights.reset()
    return result
