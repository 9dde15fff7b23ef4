"""Warnings about the optimizer's parameters: outside the model, or frozen at the wrong time."""

from __future__ import annotations

import logging
from typing import Any

from ds_patches.core import log
from ds_patches.upstream import fragments
from ds_patches.upstream.classes import is_fp16_wrapper

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
#: Settings of a parameter group with which an optimizer changes a parameter whose gradient is zero.
_MOVING = ("betas", "momentum", "weight_decay")


class OptimizerParameters:
    """An engine's optimizer's parameters, with their `requires_grad` at `initialize`."""

    def __init__(self, engine: Any) -> None:
        groups = engine.basic_optimizer.param_groups
        # zero12_gradients freezes parameters of no elements: no warning about them.
        self._entries = [
            (param, group)
            for group in groups
            for param in group["params"]
            if getattr(param, "ds_numel", param.numel())
        ]
        self._params = [param for param, _ in self._entries]
        self._required_grad = [param.requires_grad for param in self._params]
        self._warned: set[str] = set()

    def warn_of_unfit(self, engine: Any) -> None:
        """Warn about parameters with which `initialize` raises, or ranks drift apart."""
        if engine.zero_optimization() and not any(self._required_grad):
            logger.log(log.level_for_the_job(), _NOTHING_TRAINABLE)
        inside = {id(param) for param in engine.module.parameters()}
        outside = [
            str(tuple(getattr(param, "ds_shape", param.shape)))
            for param, trained in zip(self._params, self._required_grad, strict=True)
            if trained and id(param) not in inside
        ]
        if outside:
            logger.log(log.level_for_the_job(), _OUTSIDE_MODEL, len(outside), log.named(outside))

    def warn_of_frozen(self, engine: Any) -> None:
        """Warn once about parameters that were frozen or unfrozen after `initialize`."""
        if [param.requires_grad for param in self._params] == self._required_grad:
            return
        name_of = {id(param): name for name, param in engine.module.named_parameters()}
        # Half precision optimizers up to 0.18 also copy and train frozen parameters, once unfrozen.
        copied = fragments.slices(engine.optimizer) if is_fp16_wrapper(engine.optimizer) else {}
        names_by: dict[str, list[str]] = {_UNFROZEN: [], _FROZEN: []}
        for (param, group), trained in zip(self._entries, self._required_grad, strict=True):
            is_updated = group["lr"] and any(map(group.get, _MOVING))
            if param.requires_grad != trained and (
                is_updated if trained else id(param) not in copied
            ):
                name = name_of.get(id(param), "one outside the model")
                names_by[_FROZEN if trained else _UNFROZEN].append(name)
        for message, names in names_by.items():
            if names and message not in self._warned:
                self._warned.add(message)
                logger.log(log.level_for_the_job(), message, log.named(names))
