"""The engine, and the state its backward hooks keep."""

from __future__ import annotations

from functools import cache
from typing import Any

from ds_patches.core import live
from ds_patches.runtime.engines import has_torch_style_backward, is_deep_compiled


def why_not_covered(engine: Any) -> str | None:
    """None if the patch covers `engine`; else the reason, empty where there is nothing to cover."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = engine.optimizer
    if not engine.zero_optimization() or not hasattr(optimizer, "step"):
        return ""  # no ZeRO, or inference only
    if engine.pipeline_parallelism:
        return ""  # one backward at a time, by a schedule
    if type(optimizer) in (FP16_Optimizer, FP16_UnfusedOptimizer):
        return ""  # stage 1 with fp32 sums, 0.17.6 to 0.18.4: nothing is partitioned
    if getattr(engine, "zenflow", False):
        return "ZenFlow moves parameters and gradients in a way of its own"
    covered = (BF16_Optimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    if type(optimizer) not in covered:
        return f"its optimizer is {type(optimizer).__name__}, which reduces in a way of its own"
    return None


def is_left(engine: Any) -> bool:
    """Whether its backwards are graphs of a compiler's, which runs no code of ours in them."""
    return is_deep_compiled(engine) or bool(getattr(engine, "_is_compiled_autograd_enabled", False))


def begin_backward(engine: Any, again: bool) -> None:
    """Do for any backward what the first one over a forward does; `again`: what that forward did.

    From 0.18.3 hooks on the engine's outputs run the prologue, once per forward. From 0.18.5 a
    forward also resets the per-step hook state, without which the epilogue of the second backward
    is never queued.
    """
    if not has_torch_style_backward(engine):
        return
    optimizer = engine.optimizer
    reset = getattr(optimizer, "clear_backward_seen_flag", None)
    if again and reset is not None:
        reset()
        optimizer._backward_active_depth = 0
    engine._backward_prologue()


def hook_state(optimizer: Any) -> Any:
    """What counts the gradients of a backward, from 0.18.5 on; None before."""
    return getattr(optimizer, "_backward_hook_state", None)


def was_not_entered(optimizer: Any) -> bool:
    """Whether gradients have come since the last forward, and no backward that upstream knows of.

    Parameters' hooks ask for one when there was another before, over the same forward.
    """
    state = hook_state(optimizer)
    return bool(state) and state.hooks_fired_this_backward and not state.backward_seen_this_step


def reached_no_parameter(engine: Any) -> bool:
    """At the end of a backward that this engine has not begun: whether it was for others alone.

    Upstream's epilogue fails where no gradient has come.
    """
    return not (engine._running_engine_backward or may_have_come(engine))


def may_have_come(engine: Any) -> bool:
    """Whether a gradient has come to a parameter in this backward, as far as the release knows."""
    state = hook_state(engine.optimizer)
    return not state or bool(state.hooks_fired_this_backward)


@cache
def divides_at_outputs() -> bool:
    """0.18.3 to 0.19.5 divide by the micro steps where a gradient comes to an engine's output.

    So a loss of ``engine.module(x)`` is not divided (8224), and in 0.18.3 one is that should not be
    (7724).
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    per_tensor = live.raw(DeepSpeedEngine, "_backward_prologue_per_tensor")
    if per_tensor is live.MISSING:
        return False
    return "is_current_graph_registered" not in live.innermost(per_tensor).__code__.co_names


@cache
def reduces_before_it_adds() -> bool:
    """0.18.3 to 0.18.9 reduce fp32 sums before they add the boundary's micro step (PR 7985)."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    epilogue = live.raw(DeepSpeedEngine, "_backward_epilogue")
    torch_style = live.raw(DeepSpeedEngine, "_backward_post_hook") is not live.MISSING
    return torch_style and "BF16_Optimizer" not in live.innermost(epilogue).__code__.co_names
