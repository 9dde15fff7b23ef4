"""Weights that a script changes between steps stay changed: loaded, initialised anew, clamped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ds_patches.core import api, engines
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.layer import Layer
from ds_patches.core.patch import Dependency, Patch
from ds_patches.upstream.classes import ENGINE, GATHERED, OPTIMIZERS, ZERO3, class_of

if TYPE_CHECKING:
    from torch import Tensor

    from ds_patches.steps.attached import Attached
    from ds_patches.steps.optimizer_params import OptimizerParameters

_FRAGMENTS = "deepspeed.utils.tensor_fragment"

PATCH = Patch(
    name="weights_by_hand",
    hooks=__name__,
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
        Dependency(_FRAGMENTS, "safe_set_full_fp32_param", "calls a method of each parameter"),
        Dependency(_FRAGMENTS, "set_full_hp_param", "is that method at ZeRO 1 and 2"),
    ),
    activate="activate",
    deactivate="deactivate",
)

apply, unapply, is_applied = api.of(__name__)

#: Writes to a parameter at ZeRO-3: those of a block are not counted.
_SEVERAL = 2


class _Weights:
    """The weights of an optimizer that steps copies, as they were when it had last written them.

    before: at ZeRO-3, partitions of parameters that were gathered since, to be changed.
    setters: at ZeRO 1 and 2, wrappers of the methods by which scripts set the copies.
    """

    def __init__(self, params: list[Any]) -> None:
        self._params = params
        self.before: dict[int, tuple[Any, Tensor]] = {}
        self.setters: list[Layer] = []
        self.read()

    def read(self) -> None:
        """Weights and copies agree now, or differ as upstream wants it."""
        self._versions = [param._version for param in self._params]
        self.before.clear()

    def gathered(self, params: list[Any]) -> None:
        """Note the partitions of those that train; the first since the last step stay."""
        for param in params:
            if param.requires_grad and id(param) not in self.before:
                self.before[id(param)] = param, param.ds_tensor.detach().clone()

    def take(self, optimizer: Any) -> None:
        """Copy weights that changed since the last step into the fp32 weights."""
        if not self.before and [param._version for param in self._params] == self._versions:
            return
        from ds_patches.upstream import fragments

        slices = fragments.slices(optimizer)
        for param, before, writes in self._changed():
            if (part := slices.get(id(param))) is None:  # another rank's
                continue
            weights, copy = fragments.weight_pair(param, part)
            weights = weights.to(copy.device)
            rounded = copy.to(weights.dtype)
            new = ~_same(weights, rounded, writes)
            if before is not None:  # a copy that was set since is newer
                before = before.to(copy.device).view(-1)[: weights.numel()]
                new &= _same(rounded, before)
            copy.copy_(weights.to(copy.dtype).where(new, copy))

    def _changed(self) -> Iterator[tuple[Any, Tensor | None, int]]:
        """Yield each parameter that was written to, what it was if that is noted, and how often."""
        for param, before in self.before.values():
            yield param, before, _SEVERAL
        for param, version in zip(self._params, self._versions, strict=True):
            if param._version != version:
                yield param, None, param._version - version


def _same(weights: Tensor, other: Tensor, writes: int = 1) -> Tensor:
    """Where two are equal: after several writes, up to a rounding step of their dtype."""
    import torch

    step = torch.finfo(weights.dtype).eps if writes > 1 else 0.0
    return torch.isclose(weights, other, rtol=step, atol=0.0, equal_nan=True)


@cache
def _given() -> Attached[OptimizerParameters]:
    """Return what is known of each engine that was built since."""
    from ds_patches.steps.attached import Attached
    from ds_patches.steps.optimizer_params import OptimizerParameters

    return Attached(f"{PATCH.name}_given", OptimizerParameters)


@cache
def _weights() -> Attached[_Weights]:
    """Return what is known of each optimizer."""
    from ds_patches.core.errors import NotChecked
    from ds_patches.steps.attached import Attached
    from ds_patches.upstream import fragments

    def make(optimizer: Any) -> _Weights | None:
        if getattr(optimizer, "params_in_nvme_and_cpu", False):  # partitioned into files
            return None
        try:
            params = [param for param, _ in fragments.slices_with_params(optimizer)]
        except NotChecked:
            return None
        return _Weights([] if class_of(optimizer) == ZERO3 else params)

    return Attached(PATCH.name, make)


def _take_in(engine: Any) -> None:
    if class_of(engine.optimizer) in OPTIMIZERS:
        weights = _weights()(engine.optimizer)
        if weights is not None and not weights.setters:
            weights.setters = [
                Layer(param, "set_full_hp_param", partial(_around_set, param))
                for param in engine.module.parameters()
                if hasattr(param, "set_full_hp_param")
            ]


def activate() -> Sequence[str]:
    """Look after the engines that there are."""
    for engine in [*engines.known]:
        _take_in(engine)
    return []


def deactivate() -> None:
    """Leave every optimizer to stock."""
    for _, weights in _weights().detach_all():
        for setter in weights.setters:
            setter.remove()
    _given().detach_all()


def around_configure(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed makes the optimizer, with a copy of the weights: they agree here."""
    result = wrapped(*args, **kwargs)
    _take_in(engine)
    return result


def around_wrapping(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed is about to wrap the optimizer, which has all parameters until then."""
    result = wrapped(*args, **kwargs)
    if (given := _given()(engine)) is not None:
        given.warn_of_unfit(engine)
    return result


def around_step(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's optimizer steps its copy, and writes that over the weights."""
    weights = _weights().get(engine.optimizer)
    if weights is None:
        return wrapped(*args, **kwargs)
    if (given := _given().get(engine)) is not None:
        given.warn_of_frozen(engine)
    weights.take(engine.optimizer)
    result = wrapped(*args, **kwargs)
    weights.read()
    return result


def around_exit(wrapped: Wrapped, gathered: Any, args: Args, kwargs: Kwargs) -> Any:
    """``GatheredParameters`` ends, and one rank's weights are partitioned anew."""
    if gathered.enabled and gathered.src_rank is not None:
        from ds_patches.upstream.zero3 import optimizers_of

        for optimizer in optimizers_of(gathered):
            if (weights := _weights().get(optimizer)) is not None:
                weights.gathered(gathered.params)
    return wrapped(*args, **kwargs)


def _around_set(param: Any, wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    """Copy a value that a script gives a parameter's copy into the parameter: ZeRO 1 and 2."""
    result = wrapped(*args, **kwargs)
    value, *state = in_order(wrapped, args, kwargs)
    if not any(state):  # else it is momentum, say
        param.data.copy_(value.reshape(param.shape))  # by `data`: no write that `take` is to see
    return result


def around_set(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's ``safe_set_full_fp32_param`` sets this rank's part of the fp32 weights."""
    result, param, value = _set_at_stage3(wrapped, optimizer, args, kwargs)
    if param is not None:
        from ds_patches.upstream.zero3 import is_available

        if is_available(param):  # small parameters stay gathered
            param.data.copy_(value.reshape(param.shape))
    return result


def around_set_part(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """``safe_set_local_fp32_param`` sets it, and has no value for the other ranks' parts."""
    return _set_at_stage3(wrapped, optimizer, args, kwargs)[0]


def _set_at_stage3(
    wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs
) -> tuple[Any, Any, Any]:
    """Copy what a script has set into the partition; return the result, parameter and value.

    The parameter is None if its weights were not set, but momentum, or are not looked after.
    """
    result = wrapped(*args, **kwargs)
    value, param, *state = in_order(wrapped, args, kwargs)
    if any(state) or not param.requires_grad or _weights().get(optimizer) is None:
        return result, None, value
    from ds_patches.upstream import fragments
    from ds_patches.upstream.zero3 import drop_secondary

    partition, copy = fragments.weight_pair(param, fragments.slice_at_stage3(optimizer, param))
    partition.copy_(copy)
    drop_secondary(param)
    return result, param, value


def around_load_state(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed takes weights and copies from a checkpoint: they agree again."""
    result = wrapped(*args, **kwargs)
    if (weights := _weights().get(optimizer)) is not None:
        weights.read()
    return result
