"""fp16 and bf16 train without ZeRO, and bf16 resumes there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order, meanwhile
from ds_patches.core.errors import Refused
from ds_patches.core.layer import layered
from ds_patches.core.patch import Class, Patch, upstream
from ds_patches.upstream.classes import ENGINE, FP16, FP16_UNFUSED, TORCH_STYLE, is_fp16_wrapper
from ds_patches.upstream.engine import as_engine_backward, unscale_norm

_OVERFLOW = Class("deepspeed.runtime.utils", "CheckOverflow")

_TAKEN_FOR_ZERO = ">=0.17.6,<=0.18.4"
_UNFUSED_BF16 = ">=0.17.6,<=0.18.5"

_TARGETS = (
    ENGINE.target("backward", "around_loss", TORCH_STYLE),
    ENGINE.target("scale", "around_loss", TORCH_STYLE),
    ENGINE.target("_backward_prologue", "around_prologue", ">=0.18.3,<=0.18.4"),
    FP16.target("step", "around_fused_step", "<=0.17.5"),
    FP16.target("step", "around_returning_step", ">=0.17.6,<=0.18.1"),
    FP16.target("step", "around_fused_step", ">=0.18.2"),
    FP16_UNFUSED.target("step", "around_unfused_step", "<=0.17.5"),
    FP16_UNFUSED.target("backward", "around_unscaled", _UNFUSED_BF16),
    FP16_UNFUSED.target("step", "around_either_step", _UNFUSED_BF16),
    FP16_UNFUSED.target("step", "around_unfused_step", ">=0.18.6"),
    FP16_UNFUSED.target("state_dict", "around_unscaled", _UNFUSED_BF16),
    ENGINE.target("_save_checkpoint", "around_checkpoint", _TAKEN_FOR_ZERO),
    ENGINE.target("load_checkpoint", "around_checkpoint", _TAKEN_FOR_ZERO),
    FP16.target("initialize_optimizer_states", "around_states"),
    FP16_UNFUSED.target("initialize_optimizer_states", "around_states"),
    FP16.target("load_state_dict", "around_load_state", ">=0.17.6"),
    FP16_UNFUSED.target("load_state_dict", "around_load_state", ">=0.17.6"),
)

_DEPENDENCIES = (
    FP16.needs("_update_scale", "raises the scale in the middle of a step"),
    FP16_UNFUSED.needs("_update_scale", "raises the scale in the middle of a step"),
    FP16.needs("unscale_and_clip_grads", "divides by the scale"),
    FP16_UNFUSED.needs("unscale_and_clip_grads", "divides by the scale"),
    ENGINE.needs("_load_checkpoint", "loads an optimizer that is none of ZeRO's", _TAKEN_FOR_ZERO),
    _OVERFLOW.needs("has_overflow", "asks all stages of a pipeline"),
)

PATCH = Patch(
    name="half_without_zero",
    hooks=__name__,
    summary="fp16 and bf16 train without ZeRO, and bf16 resumes",
    remove_when="a release scales the loss of fp16 without ZeRO; none up to 0.19.8 does",
    upstream=upstream("issue 8393", "PR 7645", "PR 7786"),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    requires=("accumulation",),
)

apply, unapply, is_applied = api.of(__name__)

_NO_STATE = (
    "This checkpoint has no optimizer state: DeepSpeed 0.17.6 to 0.18.4 saves none of bf16 without "
    "ZeRO. engine.load_checkpoint(..., load_module_only=True) takes its weights, and training "
    "starts anew with them."
)

# --- fp16: the engine scales losses, 0.18.3 and later ---------------------------------------------


def _scales_losses(engine: Any) -> bool:
    """Return True without ZeRO if the optimizer has the scale, and not PyTorch's GradScaler."""
    is_fp16 = engine.fp16_enabled() and not engine.zero_optimization()
    return is_fp16 and engine.torch_autocast_z0_gradscaler is None


class _LossScale:
    """What the engine asks to scale a loss, in the place of PyTorch's own GradScaler."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def scale(self, loss: Any) -> Any:
        """Return the loss times the scale of this step; in fp32, as most scales do not fit fp16."""
        return loss.float() * self.optimizer.loss_scale


def around_loss(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed multiplies a loss by the scale of ZeRO or autocast; here, of this optimizer."""
    if not _scales_losses(engine):
        return wrapped(*args, **kwargs)
    with meanwhile(engine, torch_autocast_z0_gradscaler=_LossScale(engine.optimizer)):
        return wrapped(*args, **kwargs)


def around_prologue(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """0.18.3 and 0.18.4 take the backwards of a pipeline's stages for a script's, and refuse them.

    A stage's gradients carry the scale of the last stage. All stages see an overflow in one of
    them, so that they have the same scale.
    """
    if not (engine.pipeline_parallelism and _scales_losses(engine)):
        return wrapped(*args, **kwargs)
    with as_engine_backward(engine):
        return wrapped(*args, **kwargs)


# --- the optimizer's states are made by the first step --------------------------------------------


def around_states(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed has the optimizer make its states by a step; here it takes none but a 1-bit one."""
    if hasattr(optimizer.optimizer, "initialize"):
        return wrapped(*args, **kwargs)
    with layered(optimizer.optimizer, step=lambda *_: None):
        return wrapped(*args, **kwargs)


# --- fp16: a scale that rises does so at the end of its step --------------------------------------


@contextmanager
def _rising_last(optimizer: Any) -> Iterator[None]:
    """Let a scale that rises in a step rise at its end: gradients are still divided by the old one.

    A scale that falls is that of a step that is skipped.
    """
    rises: list[Wrapped] = []

    def update(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        if in_order(wrapped, args, kwargs)[0]:
            wrapped(*args, **kwargs)
        else:
            rises.append(wrapped)

    with layered(optimizer, _update_scale=update):
        yield
    for update_scale in rises:
        update_scale(False)


def around_fused_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's step raises the scale before it divides by it; here, at its end."""
    with _rising_last(optimizer):
        return wrapped(*args, **kwargs)


def around_returning_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """0.17.6 to 0.18.1 look for an overflow and return; with no scale to look after they step."""
    with _rising_last(optimizer):
        overflow = wrapped(*args, **kwargs)
        if overflow or not optimizer.use_grad_scaling or optimizer.fused_adam_legacy:
            return overflow
        with meanwhile(optimizer, use_grad_scaling=False):
            return wrapped(*args, **kwargs)


def around_unfused_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Its norm, which the engine tells, is that of the scaled gradients."""
    scale = optimizer.loss_scale
    with _rising_last(optimizer):
        overflow = wrapped(*args, **kwargs)
    if not overflow:
        unscale_norm(optimizer, scale)
    return overflow


# --- bf16: the optimizer of fp16 needs no scale, 0.17.6 to 0.18.5 ---------------------------------


def _is_bf16(optimizer: Any) -> bool:
    params = (param for group in optimizer.fp16_groups for param in group)
    return any(str(param.dtype) == "torch.bfloat16" for param in params)


def _unscaled(optimizer: Any) -> AbstractContextManager[None]:
    """Set the loss scale to 1 for a while, if the parameters are bf16."""
    if not _is_bf16(optimizer):
        return nullcontext()
    return meanwhile(optimizer, dynamic_loss_scale=False, cur_scale=1.0)


def around_either_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's step divides by the scale, and in bf16 no loss was multiplied by one."""
    if not _is_bf16(optimizer):
        return around_unfused_step(wrapped, optimizer, args, kwargs)
    with _unscaled(optimizer):
        result = wrapped(*args, **kwargs)
    optimizer.zero_grad()
    return result


def around_unscaled(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's wrapper scales in its backward up to 0.18.2, and saves a scale; bf16 has none."""
    with _unscaled(optimizer):
        return wrapped(*args, **kwargs)


# --- bf16: checkpoints, 0.17.6 to 0.18.4, where the engine takes every optimizer for one of ZeRO's


def around_checkpoint(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed saves and loads: an optimizer that is none of ZeRO's would be in no file."""
    if not (is_fp16_wrapper(engine.optimizer) and engine.bfloat16_enabled()):
        return wrapped(*args, **kwargs)
    no = lambda *_: False  # noqa: E731
    with layered(engine, bfloat16_enabled=no, zero_optimization=no):
        return wrapped(*args, **kwargs)


def around_load_state(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed loads the optimizer's state; a checkpoint that has none is refused."""
    if in_order(wrapped, args, kwargs)[0] is None:
        raise Refused(_NO_STATE)
    return wrapped(*args, **kwargs)
