"""The engine: whether a patch covers it, and the state that its backwards keep."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from ds_patches.core import live
from ds_patches.core.calls import meanwhile
from ds_patches.core.errors import Refused
from ds_patches.upstream.kinds import Kind, is_half, kind_of

# --- What it is -----------------------------------------------------------------------------------


def why_not_covered(engine: Any) -> str | None:
    """Return None if the engine's steps are kept; else the reason to warn of, or "" for none."""
    optimizer = engine.optimizer
    if not engine.zero_optimization() or not hasattr(optimizer, "step"):
        return ""  # no ZeRO, or inference only
    if engine.pipeline_parallelism:
        return ""  # one backward at a time, by a schedule
    if is_half(optimizer):
        return ""  # stage 1 with fp32 sums, 0.17.6 to 0.18.4: nothing is partitioned
    if getattr(engine, "zenflow", False):
        return "ZenFlow moves parameters and gradients in a way of its own"
    if kind_of(optimizer) is Kind.OTHER:
        return f"its optimizer is {type(optimizer).__name__}, which reduces in a way of its own"
    return None


def has_torch_style_backward(engine: Any) -> bool:
    """Whether ``loss.backward()`` without the engine works: 0.18.3 and later."""
    return hasattr(engine, "_backward_post_hook")


#: Nothing, until somebody has imported it.
_compiler, _AUTOGRAD = sys.modules.get, "torch._dynamo.compiled_autograd"
_ENABLED = "compiled_autograd_enabled"


def is_compiled(engine: Any) -> bool:
    """Whether ``engine.compile()`` was called, or the script has enabled compiled autograd."""
    return bool(engine._is_compiled or getattr(_compiler(_AUTOGRAD), _ENABLED, False))


def is_deep_compiled(engine: Any) -> bool:
    """Whether DeepCompile took the gathers and the reduction into its graphs (0.16.6 and later)."""
    active = getattr(engine, "is_deepcompile_active", None)
    if active is not None:
        return bool(active())
    enabled = getattr(engine, "is_deepcompile_enabled", None)
    return enabled is not None and bool(enabled() and engine.is_compiled)


def is_left(engine: Any) -> bool:
    """Whether a compiler runs the engine's backwards, in which no code of ours would run."""
    asked = getattr(engine, "_is_compiled_autograd_enabled", False)
    compiles = asked or getattr(_compiler(_AUTOGRAD), _ENABLED, False)
    return bool(compiles) or is_deep_compiled(engine)


def trained(engine: Any) -> set[int]:
    """Return the ids of the parameters that its ZeRO optimizer steps a copy of."""
    for name in ("bit16_groups", "fp16_groups", "bf16_groups"):  # 1 and 2; 3; BF16_Optimizer
        if (groups := getattr(engine.optimizer, name, None)) is not None:
            return {id(param) for group in groups for param in group}
    return set()


_PROLOGUE = "_backward_prologue"


def keep_prologue_eager(engine: Any) -> bool | None:
    """Under compiled autograd, have Dynamo compile nothing of the prologue; None elsewhere.

    Past a wrapper it would compile a part that has to run in the graph task, and fail.
    """
    if is_deep_compiled(engine) or not hasattr(engine, _PROLOGUE):
        return None
    import torch

    vars(engine)[_PROLOGUE] = torch.compiler.disable(getattr(engine, _PROLOGUE))  # type: ignore[no-untyped-call]
    return True


def give_prologue_back(engine: Any) -> None:
    """Leave it to Dynamo as before."""
    del vars(engine)[_PROLOGUE]


def folds_experts(engine: Any) -> bool:
    """Whether AutoEP's tensor parallel ranks correct gradients in each backward."""
    folding = getattr(engine, "_autoep_folding_spec", None)
    return folding is not None and bool(folding.tp_size > 1)


# --- Dividing by the micro steps ------------------------------------------------------------------


def divides_gradients(engine: Any) -> bool:
    """Whether the engine divides gradients at its outputs by the micro steps: 0.18.3 and later."""
    trains = hasattr(engine.optimizer, "step") and not getattr(engine, "zenflow", False)
    return has_torch_style_backward(engine) and trains and not engine.pipeline_parallelism


@cache
def divides_at_outputs() -> bool:
    """Whether ``engine.backward`` leaves the division to the outputs too: 0.18.3 to 0.19.5.

    So a loss of ``engine.module(x)`` is not divided (8224), and in 0.18.3 one is that should not be
    (7724).
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    per_tensor = live.raw(DeepSpeedEngine, "_backward_prologue_per_tensor")
    if per_tensor is live.MISSING:
        return False
    return "is_current_graph_registered" not in live.innermost(per_tensor).__code__.co_names


def keep_scale(engine: Any, scale_wrt_gas: bool) -> None:
    """Have the hooks of outputs divide, or not, until the next ``engine.backward``: from 0.18.4 on.

    In 0.18.3 they always do.
    """
    if hasattr(engine, "_scale_wrt_gas"):
        engine._scale_wrt_gas = scale_wrt_gas


def dividing_by_micro_steps(engine: Any) -> AbstractContextManager[None]:
    """Let ``engine.backward`` divide the loss by gradient_accumulation_steps, as outside.

    Up to 0.18.2 it leaves that out under no_sync; from 0.18.3 it never does.
    """
    if has_torch_style_backward(engine):
        return nullcontext()
    return meanwhile(engine, inside_no_sync_ctxt=False)


def count_anew(engine: Any) -> None:
    """Let a step begin here, of as many micro steps as the engine has now."""
    steps = engine.gradient_accumulation_steps()
    engine.micro_steps -= engine.micro_steps % steps
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = steps


# --- A backward -----------------------------------------------------------------------------------


def begin_backward(engine: Any, again: bool) -> None:
    """Do for any backward what the first one over a forward does; `again`: what that forward did.

    From 0.18.3 hooks on the engine's outputs run the prologue, once per forward. From 0.18.5 a
    forward also resets the per-step hook state, without which the epilogue of the second backward
    is never queued.
    """
    optimizer = engine.optimizer
    if again and hasattr(optimizer, "clear_backward_seen_flag"):
        optimizer.clear_backward_seen_flag()
        optimizer._backward_active_depth = 0
    if has_torch_style_backward(engine):  # before, ``engine.backward`` calls it with its loss
        engine._backward_prologue()


def hook_state(optimizer: Any) -> Any:
    """Return what counts the gradients of a backward, from 0.18.5 on; None before."""
    return getattr(optimizer, "_backward_hook_state", None)


def missed_backward(optimizer: Any) -> bool:
    """Whether parameters got gradients, and DeepSpeed saw no backward begin.

    The hooks of parameters ask for one if the forward has had another before.
    """
    state = hook_state(optimizer)
    return bool(state) and state.hooks_fired_this_backward and not state.backward_seen_this_step


def reached_no_parameter(engine: Any) -> bool:
    """Whether a backward that ``engine.backward`` did not begin ends without a gradient of ours.

    DeepSpeed's epilogue fails in that case.
    """
    return not (engine._running_engine_backward or may_have_come(engine))


def may_have_come(engine: Any) -> bool:
    """Whether a gradient has come to a parameter in this backward, as far as the release knows.

    Hooks of parameters count, which stage 1 lacks without contiguous gradients; those of
    ``BF16_Optimizer`` count nothing.
    """
    optimizer = engine.optimizer
    state = hook_state(optimizer)
    counts = state and optimizer._grad_acc_hooks and hasattr(optimizer, gradient_method(optimizer))
    return not counts or bool(state.hooks_fired_this_backward)


def forget_last_step(engine: Any) -> None:
    """Do the clean-up that the forward after a reduction does, unless it was done.

    From 0.18.5 it is left to that forward. A block whose first backward runs over an older
    forward would lose its gradients to it, or find the last step's in their place.
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "_epilogue_ran_this_backward", False):
        optimizer.clear_backward_seen_flag()


def forget_backward(engine: Any) -> None:
    """Clear what a backward that raised left behind in the engine's hook state."""
    if not has_torch_style_backward(engine):
        return
    optimizer = engine.optimizer
    optimizer._backward_active_depth = 0
    optimizer._remaining_grad_acc_hooks = 0
    reset = getattr(optimizer, "clear_backward_seen_flag", None)  # 0.18.5
    if reset is not None:
        optimizer._epilogue_ran_this_backward = False
        reset()
    if not hasattr(engine, "_running_engine_backward_count"):  # 0.18.3-0.19.5: a flag, no finally
        engine._running_engine_backward = False
    engine._manual_backward_expected = False


def stop_timers(engine: Any) -> None:
    """Stop those that an exception left running: they refuse to be started again."""
    for timer in getattr(engine.timers, "timers", {}).values():
        if timer.started_:
            timer.stop()


def must_scale(engine: Any) -> None:
    """Raise Refused for a plain backward in fp16 where it does not scale: up to 0.18.2."""
    if engine.fp16_enabled() and not has_torch_style_backward(engine):
        raise Refused(
            "backward() of a tensor in fp16: this DeepSpeed scales a loss in engine.backward() "
            "alone. Call engine.backward(tensor) instead."
        )


@cache
def reduces_before_it_adds() -> bool:
    """Whether fp32 sums are reduced before the last micro step is added: 0.18.3 to 0.18.9.

    PR 7985.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    epilogue = live.raw(DeepSpeedEngine, "_backward_epilogue")
    torch_style = live.raw(DeepSpeedEngine, "_backward_post_hook") is not live.MISSING
    return torch_style and "BF16_Optimizer" not in live.innermost(epilogue).__code__.co_names


def gradient_method(optimizer: Any) -> str:
    """Return the name of the method that a parameter's hook hands its gradient to."""
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


# --- no_sync() ------------------------------------------------------------------------------------


def own_no_sync_works(engine: Any) -> bool:
    """Whether DeepSpeed's ``no_sync()`` works: at stages 0 and 1, unless overlap_comm is on."""
    reduces = getattr(engine.optimizer, "overlap_comm", False)
    return not (engine.zero_optimization_partition_gradients() or reduces)


def leaves_undivided(engine: Any) -> bool:
    """Whether DeepSpeed's ``no_sync()`` leaves losses undivided by micro steps: up to 0.18.2."""
    return not has_torch_style_backward(engine) and engine.gradient_accumulation_steps() > 1
