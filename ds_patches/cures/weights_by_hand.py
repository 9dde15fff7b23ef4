"""Weights that a script changes between steps stay changed: loaded, initialised anew, clamped.

Use
    Apply it before ``initialize``, and leave the script as it is. The next step then begins with
    what ``module.load_state_dict``, ``engine.load_module_state_dict``, ``torch.nn.init``, or a
    clamp or copy under ``torch.no_grad()`` made of the weights: with ZeRO 1 and 2, without ZeRO in
    bf16 and fp16, and with ZeRO-3 in a ``GatheredParameters(..., modifier_rank=...)``.

    A parameter that is frozen or unfrozen after ``initialize`` is named in one warning, at the
    first step that does with it what stock does: it does not train, or goes on moving by momentum
    and weight decay.

Risks
    - **All ranks.** At ZeRO 1 and 2 each rank has to make the same change, as in PyTorch.
    - **There and back.** SAM adds to the weights, and subtracts that again before its step. What is
      off then by one rounding step of the weights' dtype is taken for unchanged. A weight that is
      smaller than what was added is off by more, and stays so, as in PyTorch without fp32 copies.
      Copy the old weights back instead: those lose nothing.
    - **Set twice.** At ZeRO 1 and 2 a parameter that was changed this way and by
      ``safe_set_full_fp32_param`` in the same step gets the first, if the two differ.

Cost
    In each step a look at the version counter of each of a rank's parameters, and at
    ``requires_grad``: 4 µs each for 100 of them.
    After a change, a comparison of what was changed; at ZeRO-3 a copy of its partition until then.

Not covered
    | what | what happens |
    |---|---|
    | ``param.data.clamp_()`` and others through ``.data``, at ZeRO 0 to 2 | undone, as on stock. \
Write ``with torch.no_grad(): param.clamp_()`` |
    | ZeRO-3, parameters changed outside of such a block | undone, as on stock |
    | changes of one rounding step of bf16 or fp16, as ``mul_(0.998)``, written in several \
operations or at ZeRO-3 | undone, as on stock. Use ``safe_set_full_fp32_param`` |
    | parameters or optimizer on NVMe, ZenFlow, SuperOffload, FusedAdam's own fp16 | left to stock |

Why
    ZeRO, bf16 and fp16 step a copy of the weights in fp32, made in ``initialize``, and then write
    it over the weights. What was done to these alone is lost, in every release, without a word.
    There is no copy of what is frozen in ``initialize``.

How
    PyTorch counts the writes to each tensor. Where they are more than after the last step, elements
    that are not their copy rounded become the copy. All others keep theirs, to the last bit. After
    several writes, which may have been there and back, the next to it is taken for it. At ZeRO-3
    weights are compared with what they were before the block.

Upstream
    No issue was found.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ds_patches.core import api, log
from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.engines import built
from ds_patches.core.patch import Patch
from ds_patches.upstream.places import BF16, ENGINE, FP16, FP16_UNFUSED, GATHERED, ZERO3, ZERO12

if TYPE_CHECKING:
    from torch import Tensor

    from ds_patches.steps.attached import Attached

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
        *(
            kind.target("load_state_dict", "around_load_state")
            for kind in (ZERO12, ZERO3, BF16, FP16, FP16_UNFUSED)
        ),
    ),
    activate="activate",
    deactivate="deactivate",
)

apply, unapply, is_applied = api.of(__name__)

logger = logging.getLogger("ds_patches.weights_by_hand")

_UNFROZEN = (
    "These parameters were frozen in deepspeed.initialize and are not now, but no step trains "
    "them: %s. Call initialize again after unfreezing them; or leave them unfrozen before it, and "
    "give their group a learning rate of 0 until they are to train."
)
_FROZEN = (
    "These parameters were frozen after deepspeed.initialize, and steps without their gradient go "
    "on moving them, by momentum and weight decay: %s. Set the learning rate of their group to 0, "
    "or call initialize again."
)
#: Settings of a group by which an optimizer moves what has a gradient of zeros.
_MOVING = ("betas", "momentum", "weight_decay")

#: Writes to a parameter at ZeRO-3: those of a block are not counted.
_SEVERAL = 2


class _Weights:
    """The weights of an optimizer that steps copies, as they were when it had last written them.

    before: at ZeRO-3, partitions of parameters that were gathered since, to be changed.
    """

    def __init__(self, params: list[Any]) -> None:
        self._params = params
        self.before: dict[int, tuple[Any, Tensor]] = {}
        self.read()

    def read(self) -> None:
        """Weights and copies agree now, or differ as upstream wants it."""
        self._versions = [param._version for param in self._params]
        self._sum = sum(self._versions)
        self.before.clear()

    def take(self, optimizer: Any) -> None:
        """Let what was changed since be what is stepped."""
        if self.before or sum([param._version for param in self._params]) != self._sum:
            self._take(optimizer)

    def _take(self, optimizer: Any) -> None:
        from ds_patches.upstream import stepped

        where = stepped.slices(optimizer)
        for param, before, writes in self._changed():
            if (here := where.get(id(param))) is None:  # another rank's
                continue
            mine, copy = stepped.both(param, here)
            mine = mine.to(copy.device)
            rounded = copy.to(mine.dtype)
            new = ~_same(mine, rounded, writes)
            if before is not None:  # a copy that was set since is newer
                before = before.to(copy.device).view(-1)[: mine.numel()]
                new &= ~_same(mine, before, writes) & _same(rounded, before)
            copy.copy_(mine.to(copy.dtype).where(new, copy))

    def _changed(self) -> Iterator[tuple[Any, Tensor | None, int]]:
        """Yield each parameter that was written to, what it was if that is noted, and how often."""
        for param, before in self.before.values():
            yield param, before, _SEVERAL
        for param, version in zip(self._params, self._versions, strict=True):
            if param._version != version:
                yield param, None, param._version - version


def _same(one: Tensor, other: Tensor, writes: int = 1) -> Tensor:
    """Where two are equal: after several writes, up to a rounding step of their dtype."""
    import torch

    step = torch.finfo(one.dtype).eps if writes > 1 else 0.0
    return torch.isclose(one, other, rtol=step, atol=0.0, equal_nan=True)


class _Frozen:
    """Which parameters were frozen when an engine's optimizer was given them."""

    def __init__(self, engine: Any) -> None:
        groups = engine.basic_optimizer.param_groups
        self._given = [(param, group) for group in groups for param in group["params"]]
        self._params = [param for param, _ in self._given]
        self._trained = [param.requires_grad for param in self._params]
        self._said: set[str] = set()

    def look(self, engine: Any) -> None:
        """Say once what is frozen now and was not, and the other way round."""
        if [param.requires_grad for param in self._params] == self._trained:
            return
        from ds_patches.upstream import kinds, stepped

        here = {id(param): name for name, param in engine.module.named_parameters()}
        # To 0.18 these copy what is frozen, too.
        is_half = kinds.is_half(engine.optimizer)
        copied = stepped.slices(engine.optimizer) if is_half else {}
        found: dict[str, list[str]] = {_UNFROZEN: [], _FROZEN: []}
        for (param, group), trained in zip(self._given, self._trained, strict=True):
            moves = group["lr"] and any(map(group.get, _MOVING))
            if param.requires_grad != trained and (moves if trained else id(param) not in copied):
                found[_FROZEN if trained else _UNFROZEN].append(here.get(id(param), "one outside"))
        for message, names in found.items():
            if names and message not in self._said:
                self._said.add(message)
                logger.log(log.for_the_job(), message, log.named(names))


@cache
def _frozen() -> Attached[_Frozen]:
    """Return what is known of each engine that was built since."""
    from ds_patches.steps.attached import Attached

    return Attached(f"{PATCH.name}_frozen", _Frozen)


@cache
def _weights() -> Attached[_Weights]:
    """Return what is known of each optimizer."""
    from ds_patches.core.errors import NotChecked
    from ds_patches.steps.attached import Attached
    from ds_patches.upstream import kinds, stepped, zero3

    def make(optimizer: Any) -> _Weights | None:
        if zero3.is_on_nvme(optimizer):
            return None
        try:
            found = [param for param, _ in stepped.located(optimizer)]
        except NotChecked:
            return None
        is_gathered = kinds.kind_of(optimizer) is kinds.Kind.ZERO3
        return _Weights([] if is_gathered else found)

    return Attached(PATCH.name, make)


def _take_in(engine: Any) -> None:
    from ds_patches.upstream.kinds import Kind, kind_of

    if kind_of(engine.optimizer) is not Kind.OTHER:
        _weights()(engine.optimizer)


def activate() -> Sequence[str]:
    """Look after the engines that there are."""
    for engine in built():
        _take_in(engine)
    return []


def deactivate() -> None:
    """Leave every optimizer to stock."""
    _weights().detach_all()
    _frozen().detach_all()


def around_configure(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed makes the optimizer, with a copy of the weights: they agree here."""
    result = wrapped(*args, **kwargs)
    _take_in(engine)
    return result


def around_wrapping(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed is about to wrap the optimizer, which has all parameters until then."""
    result = wrapped(*args, **kwargs)
    _frozen()(engine)
    return result


def around_step(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's optimizer steps its copy, and writes that over the weights."""
    weights = _weights().get(engine.optimizer)
    if weights is None:
        return wrapped(*args, **kwargs)
    if (frozen := _frozen().get(engine)) is not None:
        frozen.look(engine)
    weights.take(engine.optimizer)
    result = wrapped(*args, **kwargs)
    weights.read()
    return result


def around_exit(wrapped: Wrapped, gathered: Any, args: Args, kwargs: Kwargs) -> Any:
    """``GatheredParameters`` ends, and one rank's weights are partitioned anew."""
    if gathered.enabled and gathered.src_rank is not None:
        from ds_patches.upstream import zero3

        for optimizer in {*map(zero3.optimizer_of, gathered.params)} - {None}:
            if (weights := _weights().get(optimizer)) is not None:
                zero3.note_partitions(weights.before, gathered.params)
    return wrapped(*args, **kwargs)


def around_load_state(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed takes weights and copies from a checkpoint: they agree again."""
    result = wrapped(*args, **kwargs)
    if (weights := _weights().get(optimizer)) is not None:
        weights.read()
    return result
