"""fp16 and bf16 train without ZeRO, and bf16 resumes there.

Use
    Apply it, and leave the training loop as it is. Then these work without ZeRO (stage 0):

    - fp16, with optimizers of PyTorch's and with FusedAdam: weights move as far as in PyTorch,
      clipping uses the right norm, and all ranks skip a step that overflows on one;
    - ``PipelineModule`` with fp16, of one stage or more;
    - bf16 with an optimizer of PyTorch's (0.17.6 to 0.18.5);
    - Adam, and weight decay: the first step is the first one;
    - checkpoints of bf16, also at stage 1 with fp32 sums (0.17.6 to 0.18.4), which now hold the
      optimizer.

    It requires ``accumulation``, which divides by the micro steps once.

Risks
    - **Scaled by hand.** If your script multiplies the loss by ``engine.optimizer.loss_scale``,
      because DeepSpeed 0.18.3 and later do not, remove that.
    - **Gradients.** From 0.18.3 on, ``param.grad`` before the step is scaled, as up to 0.18.2.
    - **The first steps.** A dynamic loss scale begins high (2^16 by default). The first steps may
      overflow now, and are skipped until the scale fits.
    - **Older checkpoints.** A checkpoint that 0.17.6 to 0.18.4 wrote without this patch has no
      optimizer state. Loading it raises an error that says what to do. On stock, Adam starts anew,
      and the first step resets the weights to those from before loading.
    - **Stage 1 with fp32 sums.** Releases from 0.18.5 on save the optimizer in other files, and do
      not find it in checkpoints of older ones.

Not covered
    | what | what happens |
    |---|---|
    | backwards without ``engine.backward`` | refused by DeepSpeed (0.18.3 and later) |
    | FusedAdam with a static loss scale, to 0.17.0 | an error about a timer, in the first step |
    | a scale that rises at ZeRO 1 to 3 | left to stock |
    | the step of zeros of a 1-bit optimizer | left to stock |

Cost
    Two Python functions a step. Memory of the optimizer's states is taken by the first step, not
    by ``initialize``.

Why
    Without ZeRO, the optimizer of fp16 divides gradients by a loss scale. Up to 0.18.2 it also
    multiplies the loss by that scale; from 0.18.3 on nobody does. In every release the scale rises
    in the middle of a step, so that the step's gradients are divided by twice their scale. From
    0.17.6 on bf16 gets the same optimizer, and up to 0.18.4 checkpoints take it for one of ZeRO's.
    In every release ``initialize`` steps with gradients of zeros, to have the states: weights decay
    once more, and Adam's first update is smaller by a quarter, as of a second step.

How
    The engine scales losses as it does for ``torch.autocast``, with the optimizer's scale instead
    of PyTorch's GradScaler. The scale rises at the end of a step. The step of zeros is left out.
    Checkpoints of bf16 are written like those of fp16, as in later releases.

Upstream
    Issue 8393 (fp16, open); pull requests 7645 (FusedAdam, 0.18.2), 7839 (bf16, 0.18.6),
    7571, 7586 and 7786 (checkpoints, 0.18.0 and 0.18.5).
"""

from __future__ import annotations

from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order, meanwhile
from ds_patches.core.errors import Refused
from ds_patches.core.layer import layered
from ds_patches.core.patch import Class, Patch, upstream
from ds_patches.upstream import half
from ds_patches.upstream.kinds import is_half
from ds_patches.upstream.pipeline import as_engine_backward
from ds_patches.upstream.places import ENGINE, FP16, FP16_UNFUSED, TORCH_STYLE

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


class _LossScale:
    """What the engine asks to scale a loss, in the place of PyTorch's own GradScaler."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def scale(self, loss: Any) -> Any:
        """Return the loss times the scale of this step; in fp32, as most scales do not fit fp16."""
        return loss.float() * self.optimizer.loss_scale


def around_loss(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed multiplies a loss by the scale of ZeRO or autocast; here, of this optimizer."""
    if engine.zero_optimization() or not half.scales_losses(engine):
        return wrapped(*args, **kwargs)
    with meanwhile(engine, torch_autocast_z0_gradscaler=_LossScale(engine.optimizer)):
        return wrapped(*args, **kwargs)


def around_prologue(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """0.18.3 and 0.18.4 take the backwards of a pipeline's stages for a script's, and refuse them.

    A stage's gradients carry the scale of the last stage. All stages see an overflow in one of
    them, so that they have the same scale.
    """
    is_whole = not engine.pipeline_parallelism or engine.zero_optimization()
    if is_whole or not half.scales_losses(engine):
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


def around_fused_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's step raises the scale before it divides by it; here, at its end."""
    with half.rising_last(optimizer):
        return wrapped(*args, **kwargs)


def around_returning_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """0.17.6 to 0.18.1 look for an overflow and return; with no scale to look after they step."""
    with half.rising_last(optimizer):
        overflow = wrapped(*args, **kwargs)
        if overflow or not optimizer.use_grad_scaling or optimizer.fused_adam_legacy:
            return overflow
        with meanwhile(optimizer, use_grad_scaling=False):
            return wrapped(*args, **kwargs)


def around_unfused_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Its norm, which the engine tells, is that of the scaled gradients."""
    scale = optimizer.loss_scale
    with half.rising_last(optimizer):
        overflow = wrapped(*args, **kwargs)
    if not overflow:
        half.unscale_norm(optimizer, scale)
    return overflow


# --- bf16: the optimizer of fp16 needs no scale, 0.17.6 to 0.18.5 ---------------------------------


def around_either_step(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's step divides by the scale, and in bf16 no loss was multiplied by one."""
    if not half.is_bf16(optimizer):
        return around_unfused_step(wrapped, optimizer, args, kwargs)
    with half.unscaled(optimizer):
        result = wrapped(*args, **kwargs)
    optimizer.zero_grad()
    return result


def around_unscaled(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's wrapper scales in its backward up to 0.18.2, and saves a scale; bf16 has none."""
    with half.unscaled(optimizer):
        return wrapped(*args, **kwargs)


# --- bf16: checkpoints, 0.17.6 to 0.18.4, where the engine takes every optimizer for one of ZeRO's


def around_checkpoint(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed saves and loads: an optimizer that is none of ZeRO's would be in no file."""
    if not (is_half(engine.optimizer) and engine.bfloat16_enabled()):
        return wrapped(*args, **kwargs)
    no = lambda *_: False  # noqa: E731
    with layered(engine, bfloat16_enabled=no, zero_optimization=no):
        return wrapped(*args, **kwargs)


def around_load_state(wrapped: Wrapped, optimizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed loads the optimizer's state; a checkpoint that has none is refused."""
    if in_order(wrapped, args, kwargs)[0] is None:
        raise Refused(_NO_STATE)
    return wrapped(*args, **kwargs)
