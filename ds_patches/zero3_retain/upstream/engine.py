"""The engine, and the state its backward hooks keep."""

from __future__ import annotations

from typing import Any

from ds_patches.core.engines import has_torch_style_backward


def why_not_covered(engine: Any) -> str | None:
    """None if the patch covers `engine`; else the reason, empty where there is nothing to cover."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = engine.optimizer
    if not engine.zero_optimization() or not hasattr(optimizer, "step"):
        return ""  # no ZeRO, or inference only
    if getattr(engine, "zenflow", False):
        return "ZenFlow moves parameters and gradients in a way of its own"
    covered = (BF16_Optimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    if type(optimizer) not in covered:
        return f"its optimizer is {type(optimizer).__name__}, which reduces in a way of its own"
    return None


def begin_backward_again(engine: Any) -> None:
    """Do for a second backward over one forward what a forward and a first backward do.

    From 0.18.3 hooks on the engine's outputs run the prologue, once per forward. From 0.18.5 a
    forward also resets the per-step hook state, without which the epilogue of the second backward
    is never queued.
    """
    if not has_torch_style_backward(engine):
        return
    reset = getattr(engine.optimizer, "clear_backward_seen_flag", None)
    if reset is not None:
        reset()
    engine._backward_prologue()


def reached_no_parameter(engine: Any) -> bool:
    """Whether the graph task that ends here produced no parameter's gradient (0.18.5 and later)."""
    optimizer = engine.optimizer
    return not engine._running_engine_backward and optimizer._hooks_fired_this_backward == 0


def end_without_epilogue(engine: Any) -> None:
    """Leave the backward that the prologue entered."""
    engine.optimizer.exit_backward()
    engine._stop_timers(engine.engine_timers.backward_inner_timers)
    engine._stop_timers(engine.engine_timers.backward_timers)
