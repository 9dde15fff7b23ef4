"""The parameters that the optimizer was given, and warnings of those that do not fit the engine."""

from __future__ import annotations

import logging
from typing import Any

from ds_patches.core import log
from ds_patches.upstream import fragments
from ds_patches.upstream.classes import is_fp16_wrapper

logger = logging.getLogger("ds_patches.weights_by_hand")

_NOTHING_TRAINS = (
    "No parameter of the optimizer requires a gradient, so ZeRO raises in deepspeed.initialize: "
    "IndexError, AssertionError or ValueError. Call requires_grad_() before it; or, if the model "
    "is not to train, give initialize no optimizer, or do not call it."
)
_OUTSIDE = (
    "The optimizer has %d trainable parameters that are not in the model of deepspeed.initialize, "
    "of shape %s. No rank gets the other ranks' gradients of them, so they drift apart; with ZeRO "
    "initialize raises KeyError or AttributeError. Freeze them by requires_grad_(False) before the "
    "optimizer is made, as GISTEmbedLoss's guide; or put them into the model, as SoftmaxLoss's "
    "classifier."
)
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


class GivenParameters:
    """The parameters that an engine's optimizer was given, and which of them were frozen."""

    def __init__(self, engine: Any) -> None:
        groups = engine.basic_optimizer.param_groups
        self._given = [(param, group) for group in groups for param in group["params"]]
        self._params = [param for param, _ in self._given]
        self._trained = [param.requires_grad for param in self._params]
        self._said: set[str] = set()

    def check(self, engine: Any) -> None:
        """Warn about parameters with which `initialize` raises, or ranks drift apart."""
        if engine.zero_optimization() and not any(self._trained):
            logger.log(log.level_for_the_job(), _NOTHING_TRAINS)
        inside = {id(param) for param in engine.module.parameters()}
        outside = [
            str(tuple(getattr(param, "ds_shape", param.shape)))
            for param, trained in zip(self._params, self._trained, strict=True)
            if trained and id(param) not in inside
        ]
        if outside:
            logger.log(log.level_for_the_job(), _OUTSIDE, len(outside), log.named(outside))

    def look(self, engine: Any) -> None:
        """Warn once about parameters that were frozen or unfrozen after `initialize`."""
        if [param.requires_grad for param in self._params] == self._trained:
            return
        name_of = {id(param): name for name, param in engine.module.named_parameters()}
        # To 0.18 these copy what is frozen, too.
        copied = fragments.slices(engine.optimizer) if is_fp16_wrapper(engine.optimizer) else {}
        names_by: dict[str, list[str]] = {_UNFROZEN: [], _FROZEN: []}
        for (param, group), trained in zip(self._given, self._trained, strict=True):
            moves = group["lr"] and any(map(group.get, _MOVING))
            if param.requires_grad != trained and (moves if trained else id(param) not in copied):
                names_by[_FROZEN if trained else _UNFROZEN].append(
                    name_of.get(id(param), "one outside")
                )
        for message, names in names_by.items():
            if names and message not in self._said:
                self._said.add(message)
                logger.log(log.level_for_the_job(), message, log.named(names))
