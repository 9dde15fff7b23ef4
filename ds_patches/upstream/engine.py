"""The engine's private methods and the state that its backwards keep."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from ds_patches.core import live
from ds_patches.core.calls import meanwhile
from ds_patches.upstream.coverage import is_deep_compiled

# --- The engine -----------------------------------------------------------------------------------


def has_torch_style_backward(engine: Any) -> bool:
    """Return True if ``loss.backward()`` without the engine works: 0.18.3 and later.

    From there on the optimizer also ends each backward that reaches it, by ``exit_backward()``.
    """
    return hasattr(engine, "_backward_post_hook")


def trained_ids(engine: Any) -> set[int]:
    """Return the ids of the parameters of which the ZeRO optimizer steps a copy."""
    for name in ("bit16_groups", "fp16_groups", "bf16_groups"):  # stages 1 and 2; 3; BF16_Optimizer
        if (groups := getattr(engine.optimizer, name, None)) is not None:
            return {id(param) for group in groups for param in group}
    return set()


_PROLOGUE = "_backward_prologue"


def disable_dynamo_for_prologue(engine: Any) -> bool | None:
    """Disable Dynamo for the backward prologue under compiled autograd; None if not needed.

    Through a wrapper Dynamo would compile a part that has to run in the graph task, and fail.
    """
    if is_deep_compiled(engine) or not hasattr(engine, _PROLOGUE):
        return None
    import torch

    vars(engine)[_PROLOGUE] = torch.compiler.disable(getattr(engine, _PROLOGUE))  # type: ignore[no-untyped-call]
    return True


def restore_prologue(engine: Any) -> None:
    """Undo `disable_dynamo_for_prologue`."""
    del vars(engine)[_PROLOGUE]


# --- Dividing by the micro steps ------------------------------------------------------------------


def divides_plain_backwards(engine: Any) -> bool:
    """Return True if ``loss.backward()`` has to be divided by the micro steps.

    From 0.18.4 to 0.19.5 not after an ``engine.backward(scale_wrt_gas=False)``.
    """
    return has_torch_style_backward(engine) and bool(getattr(engine, "_scale_wrt_gas", True))


@cache
def divides_at_outputs() -> bool:
    """Return True if ``engine.backward`` too divides at the engine's outputs: 0.18.3 to 0.19.5.

    Then a loss of ``engine.module(x)`` is not divided (8224), and in 0.18.3 losses are divided that
    should not be (7724).
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    per_tensor = live.raw(DeepSpeedEngine, "_backward_prologue_per_tensor")
    if per_tensor is live.MISSING:
        return False
    return "is_current_graph_registered" not in live.innermost(per_tensor).__code__.co_names


def set_scale_wrt_gas(engine: Any, scale_wrt_gas: bool) -> None:
    """Make output hooks divide, or not, until the next ``engine.backward``: 0.18.4 and later.

    In 0.18.3 they always divide.
    """
    if hasattr(engine, "_scale_wrt_gas"):
        engine._scale_wrt_gas = scale_wrt_gas


@contextmanager
def as_engine_backward(engine: Any, *, is_scaled: bool = False) -> Iterator[None]:
    """Mark a backward of a pipeline's stage as the engine's own: 0.18.3 and 0.18.4.

    is_scaled: its loss was multiplied by the loss scale, as a plain backward in fp16 requires.
    """
    if is_scaled and not engine._running_engine_backward:
        engine._manual_backward_expected = True
    with meanwhile(engine, _running_engine_backward=True):
        yield


def restart_micro_steps(engine: Any) -> None:
    """Begin a new step at this micro step, of the engine's current number of micro steps."""
    steps = engine.gradient_accumulation_steps()
    engine.micro_steps -= engine.micro_steps % steps
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = steps


# --- A backward -----------------------------------------------------------------------------------


def begin_backward(engine: Any, again: bool) -> None:
    """Prepare a backward as DeepSpeed prepares the first one over a forward.

    From 0.18.3 hooks on the engine's outputs run the prologue, once per forward. From 0.18.5 a
    forward also resets the hook state, without which the epilogue of a second backward is never
    queued.

    again: reset that state here.
    """
    optimizer = engine.optimizer
    if again and hasattr(optimizer, "clear_backward_seen_flag"):
        optimizer.clear_backward_seen_flag()
        optimizer._backward_active_depth = 0
    if has_torch_style_backward(engine):  # before 0.18.3 ``engine.backward`` calls it
        engine._backward_prologue()


def has_gradient_hooks(optimizer: Any) -> bool:
    """Return True if the optimizer has registered hooks at its parameters' gradients."""
    return bool(optimizer._grad_acc_hooks)


def end_plain_backward(engine: Any) -> None:
    """Run the epilogue of a plain backward, in 0.18.3 and 0.18.4."""
    engine.optimizer._remaining_grad_acc_hooks = 0
    engine._backward_post_hook()


def hook_state(optimizer: Any) -> Any:
    """Return the object that counts the gradients of a backward; None before 0.18.5."""
    return getattr(optimizer, "_backward_hook_state", None)


def saw_gradients(engine: Any) -> bool | None:
    """Return True if this backward has reached a parameter, or None if DeepSpeed does not count.

    Hooks of parameters count, from 0.18.5 on. Stage 1 has none without contiguous gradients, and
    those of ``BF16_Optimizer`` count nothing.
    """
    optimizer = engine.optimizer
    state = hook_state(optimizer)
    counts = state and optimizer._grad_acc_hooks and hasattr(optimizer, gradient_method(optimizer))
    return bool(state.hooks_fired_this_backward) if counts else None


def clear_last_step(engine: Any) -> None:
    """Do the clean-up that DeepSpeed leaves to the forward after a reduction, unless it is done.

    DeepSpeed does so from 0.18.5 on. In a block whose first backward runs over an older forward,
    the late clean-up would drop the block's gradients, or leave the last step's in their place.
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "_epilogue_ran_this_backward", False):
        optimizer.clear_backward_seen_flag()


def reset_backward(engine: Any) -> None:
    """Clear the engine's hook state after a backward that raised."""
    if not has_torch_style_backward(engine):
        return
    optimizer = engine.optimizer
    optimizer._backward_active_depth = 0
    optimizer._remaining_grad_acc_hooks = 0
    reset = getattr(optimizer, "clear_backward_seen_flag", None)  # 0.18.5
    if reset is not None:
        optimizer._epilogue_ran_this_backward = False
        reset()
    # From 0.18.3 to 0.19.5 a flag, which is not reset on errors; later a count.
    if not hasattr(engine, "_running_engine_backward_count"):
        engine._running_engine_backward = False
    engine._manual_backward_expected = False


def unscale_norm(optimizer: Any, scale: float) -> None:
    """Divide the gradients' norm, which the engine returns, by the loss scale."""
    optimizer._global_grad_norm /= scale


@cache
def reduces_before_it_adds() -> bool:
    """Return True if fp32 sums are reduced before the last micro step: 0.18.3 to 0.18.9.

    PR 7985.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    epilogue = live.raw(DeepSpeedEngine, "_backward_epilogue")
    torch_style = live.raw(DeepSpeedEngine, "_backward_post_hook") is not live.MISSING
    return torch_style and "BF16_Optimizer" not in live.innermost(epilogue).__code__.co_names


def gradient_method(optimizer: Any) -> str:
    """Return the name of the method to which a parameter's hook passes the gradient."""
    zero12 = "process_gradients"  # 0.16.5, stages 1 and 2
    return zero12 if hasattr(optimizer, zero12) else "reduce_ready_partitions_and_remove_grads"


def methods_of_hooks(optimizer: Any) -> list[str]:
    """Return the names of all methods that a parameter's hook calls."""
    names = (
        gradient_method(optimizer),
        "reenter_backward_if_needed",  # 0.18.5, and the next
        "update_hook_state_and_maybe_run_epilogue",
        "run_grad_acc_post_hooks",  # 0.18.3
    )
    return [name for name in names if hasattr(optimizer, name)]


# --- Methods that the patches add -----------------------------------------------------------------


def add_method(method: Any) -> None:
    """Add a method to DeepSpeed's engine, unless the release has one of its name."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    if not hasattr(DeepSpeedEngine, method.__name__):
        method.__qualname__ = f"{DeepSpeedEngine.__qualname__}.{method.__name__}"
        setattr(DeepSpeedEngine, method.__name__, method)


def remove_method(method: Any) -> None:
    """Remove a method that `add_method` added."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    if live.raw(DeepSpeedEngine, method.__name__) is method:
        delattr(DeepSpeedEngine, method.__name__)
