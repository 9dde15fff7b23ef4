"""Training in fp16 and bf16 without ZeRO, and resuming in bf16."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order, meanwhile
from ds_patches.core.errors import Refused
from ds_patches.core.layer import layered
from ds_patches.core.patch import Class, Patch, upstream
from ds_patches.upstream.classes import ENGINE, FP16, FP16_UNFUSED, TORCH_STYLE, is_fp16_wrapper
from ds_patches.upstream.engine import as_engine_backward, unscale_norm

_OVERFLOW = Class("deepspeed.runtime.utils", "CheckOverflow")

_OPTIMIZERS = (FP16, FP16_UNFUSED)
_ASSUMES_ZERO = ">=0.17.6,<=0.18.4"
_UNFUSED_BF16 = ">=0.17.6,<=0.18.5"

PATCH = Patch(
    name="half_without_zero",
    summary="fp16 and bf16 train without ZeRO, and bf16 resumes",
    remove_when="a release scales the loss of fp16 without ZeRO; none up to 0.19.8 does",
    upstream=upstream("issue 8393", "PR 7645", "PR 7786"),
    supported=">=0.16.0,<=0.19.8",
    targets=(
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
        ENGINE.target("_save_checkpoint", "around_checkpoint", _ASSUMES_ZERO),
        ENGINE.target("load_checkpoint", "around_checkpoint", _ASSUMES_ZERO),
        *(kind.target("initialize_optimizer_states", "around_states") for kind in _OPTIMIZERS),
        *(kind.target("load_state_dict", "around_load_state", ">=0.17.6") for kind in _OPTIMIZERS),
    ),
    dependencies=(
        *(kind.needs("_update_scale", "raises the scale in a step") for kind in _OPTIMIZERS),
        *(kind.needs("unscale_and_clip_grads", "divides by the scale") for kind in _OPTIMIZERS),
        ENGINE.needs("_load_checkpoint", "loads optimizers other than ZeRO's", _ASSUMES_ZERO),
        _OVERFLOW.needs("has_overflow", "reduces over all stages of a pipeline"),
    ),
    requires=("accumulation",),
)

apply, unapply, is_applied = api.of(__name__)

_NO_STATE = (
    "This checkpoint has no optimizer state: DeepSpeed 0.17.6 to 0.18.4 saves none for bf16 "
    "without ZeRO. To train on with its weights and a new optimizer state, call "
    "engine.load_checkpoint(..., load_module_only=True)."
)

# --- fp16: the engine scales losses, 0.18.3 and later ---------------------------------------------


def _scales_losses(engine: Any) -> bool:
    """Return True for fp16 without ZeRO, unless PyTorch's GradScaler scales the losses."""
    is_fp16 = engine.fp16_enabled() and not engine.zero_optimization()
    return is_fp16 and engine.torch_autocast_z0_gradscaler is None


def around_loss(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Multiply the loss by the optimizer's scale: DeepSpeed scales for ZeRO and autocast only."""
    if not _scales_losses(engine):
        return wrapped(*args, **kwargs)
    # In place of PyTorch's GradScaler. The loss is in fp32, as most scales overflow in fp16.
    scaler = SimpleNamespace(scale=lambda loss: loss.float() * engine.optimizer.loss_scale)
    with meanwhile(engine, torch_autocast_z0_gradscaler=scaler):
        return wrapped(*args, **kwargs)


def around_prologue(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Mark a backward of a pipeline's stage as the engine's own.

    0.18.3 and 0.18.4 take it for a backward of the script, and raise. Its gradients have the last
    stage's loss scale, which is every stage's: all stages see an overflow in one of them.
    """
    if not (engine.pipeline_parallelism and _scales_losses(engine)):
        return wrapped(*args, **kwargs)
    with as_engine_backward(engine):
        return wrapped(*args, **kwargs)


# --- the optimizer's state is created by the first step -------------------------------------------


def around_states(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Skip the step with zero gradients by which DeepSpeed creates the optimizer's state.

    It counts as a step, for example in Adam's bias correction, and decays the weights.
    """
    if hasattr(optimizer.optimizer, "initialize"):  # a 1-bit optimizer needs this step
        return wrapped(*args, **kwargs)
    with layered(optimizer.optimizer, step=lambda *_: None):
        return wrapped(*args, **kwargs)


# --- fp16: the loss scale rises at the end of the step --------------------------------------------


@contextmanager
def _raising_scale_last(optimizer: Any) -> Iterator[None]:
    """Delay a rise of the loss scale to the end: gradients must be divided by the old scale.

    A fall is not delayed: it follows an overflow, whose step is skipped.
    """
    delayed: list[Wrapped] = []

    def update(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        if in_order(wrapped, args, kwargs)[0]:  # an overflow
            wrapped(*args, **kwargs)
        else:
            delayed.append(wrapped)

    with layered(optimizer, _update_scale=update):
        yield
    for update_scale in delayed:
        update_scale(False)


def around_fused_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Raise the loss scale at the end of the step; DeepSpeed raises it before it divides by it."""
    with _raising_scale_last(optimizer):
        return wrapped(*args, **kwargs)


def around_returning_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Step after the check for overflow, from which 0.17.6 to 0.18.1 return without a step."""
    with _raising_scale_last(optimizer):
        overflow = wrapped(*args, **kwargs)
        if overflow or not optimizer.use_grad_scaling or optimizer.fused_adam_legacy:
            return overflow
        with meanwhile(optimizer, use_grad_scaling=False):
            return wrapped(*args, **kwargs)


def around_unfused_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Unscale the norm of ``engine.get_global_grad_norm()``, and raise the scale at the end."""
    scale = optimizer.loss_scale
    with _raising_scale_last(optimizer):
        overflow = wrapped(*args, **kwargs)
    if not overflow:
        unscale_norm(optimizer, scale)
    return overflow


# --- bf16: the fp16 optimizer without a loss scale, 0.17.6 to 0.18.5 ------------------------------


def _is_bf16(optimizer: Any) -> bool:
    """Return True if the optimizer has a bf16 parameter."""
    params = (param for group in optimizer.fp16_groups for param in group)
    return any(str(param.dtype) == "torch.bfloat16" for param in params)


def around_either_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Step bf16 parameters with a loss scale of 1, as their loss was not scaled."""
    if not _is_bf16(optimizer):
        return around_unfused_step(wrapped, optimizer, args, kwargs)
    result = around_unscaled(wrapped, optimizer, args, kwargs)
    optimizer.zero_grad()
    return result


def around_unscaled(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Use a loss scale of 1 in bf16; DeepSpeed to 0.18.2 scales the loss and saves the scale."""
    if not _is_bf16(optimizer):
        return wrapped(*args, **kwargs)
    with meanwhile(optimizer, dynamic_loss_scale=False, cur_scale=1.0):
        return wrapped(*args, **kwargs)


# --- bf16: checkpoints, 0.17.6 to 0.18.4 ----------------------------------------------------------


def around_checkpoint(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Save and load the bf16 optimizer without ZeRO, for which DeepSpeed writes no file."""
    if not (is_fp16_wrapper(engine.optimizer) and engine.bfloat16_enabled()):
        return wrapped(*args, **kwargs)
    false = lambda *_: False  # noqa: E731
    with layered(engine, bfloat16_enabled=false, zero_optimization=false):
        return wrapped(*args, **kwargs)


def around_load_state(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Raise Refused for a checkpoint without optimizer state, which DeepSpeed cannot load."""
    if in_order(wrapped, args, kwargs)[0] is None:
        raise Refused(_NO_STATE)
    return wrapped(*args, **kwargs)
