"""Pipelines: a step's gradient is the mean over its micro steps, on every stage.

Their backwards are a schedule of DeepSpeed's own, one at a time; nothing else of them is kept.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

import torch

from ds_patches.runtime.attributes import Wrapped, meanwhile
from ds_patches.runtime.engines import has_torch_style_backward

logger = logging.getLogger("ds_patches.accumulation")

_AVERAGED = (
    "The micro steps of this pipeline are averaged, as DeepSpeed documents it, where this release "
    "adds them up: a learning rate that was tuned to the sum wants to be %d times as large."
)
_told: WeakSet[Any] = WeakSet()


def averaged(engine: Any, loss: torch.Tensor) -> torch.Tensor:
    """The last stage's loss, on its way to ``engine.backward``.

    0.16.0 to 0.18.2 divide it only where a backward reduces, and here the schedule does that.
    """
    micro_steps: int = engine.gradient_accumulation_steps()
    if micro_steps == 1 or has_torch_style_backward(engine):
        return loss
    if engine not in _told:
        _told.add(engine)
        logger.warning(_AVERAGED, micro_steps)
    return loss.float() / micro_steps


def is_divided(engine: Any) -> bool:
    """Whether a gradient at a stage's outputs is one that the last stage has divided.

    0.18.3 to 0.19.2 divide it again, at each stage before.
    """
    return not engine.is_last_stage()


def prologue(engine: Any, wrapped: Wrapped) -> Any:
    """Of a backward, in the releases that have plain ones.

    0.18.3 and 0.18.4 refuse them without ZeRO, and under fp16 if the loss was not scaled; from
    0.18.5 on the schedule says that its own are none.
    """
    if engine._running_engine_backward:
        return wrapped()
    engine._manual_backward_expected = True  # the last stage's loss was scaled
    with meanwhile(engine, _running_engine_backward=True):
        return wrapped()
