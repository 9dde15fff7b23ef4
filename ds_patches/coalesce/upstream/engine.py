"""The engine: which are covered, its boundary, and the state that its backwards keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ds_patches.runtime import engines
from ds_patches.runtime.attributes import meanwhile

_MESSAGE = "coalesce_grad_reduction() "


def is_covered(engine: Any) -> bool:
    """Whether it can have a block."""
    try:
        must_be_covered(engine)
    except (AssertionError, NotImplementedError):
        return False
    return True


def must_be_covered(engine: Any) -> None:
    """Raise what the native method raises for an engine that cannot have a block.

    AssertionError: unmanaged gradient accumulation. NotImplementedError: no ZeRO, a pipeline, an
    optimizer or a backward that reduces in a way of its own.
    """
    managed = getattr(engine, "managed_gradient_accumulation", None)
    assert managed is None or managed(), (
        _MESSAGE + "needs managed_gradient_accumulation: without it, step() is the boundary already"
    )
    stage = int(engine.zero_optimization_stage())
    if stage not in (1, 2, 3):
        raise NotImplementedError(_MESSAGE + f"needs ZeRO stage 1, 2 or 3; this engine has {stage}")
    if (reason := _why_not(engine)) is not None:
        raise NotImplementedError(_MESSAGE + reason)


def _why_not(engine: Any) -> str | None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = engine.optimizer
    if engine.pipeline_parallelism:
        return "does not cover pipeline parallelism"
    if getattr(engine, "zenflow", False):
        return "does not cover ZenFlow: it moves gradients in a way of its own"
    if type(optimizer) not in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        name = type(optimizer).__name__
        return f"does not cover {name}: it takes gradients past the hooks of ZeRO"
    if getattr(optimizer, "swap_optimizer", False):
        return "does not cover an optimizer offloaded to NVMe: it swaps within each backward"
    if engines.is_deep_compiled(engine):
        return "does not cover DeepCompile: its graphs reduce by themselves"
    folding = getattr(engine, "_autoep_folding_spec", None)
    if folding is not None and folding.tp_size > 1:
        return "does not cover AutoEP folding: its tensor parallel correction is per backward"
    return None


def has_no_sync(engine: Any) -> bool:
    """Whether upstream's works: at stage 1, but for overlap_comm, which reduces inside it too."""
    reduces = getattr(engine.optimizer, "overlap_comm", False)
    return not (engine.zero_optimization_partition_gradients() or reduces)


def leaves_undivided(engine: Any) -> bool:
    """Whether upstream's does not divide by the micro steps in it: up to 0.18.2."""
    return not engines.has_torch_style_backward(engine) and engine.gradient_accumulation_steps() > 1


def gradient_method(optimizer: Any) -> str:
    """The method that a parameter's hook hands its gradient to, by its name."""
    flat = "process_gradients"  # 0.16.5, stages 1 and 2
    return flat if hasattr(optimizer, flat) else "reduce_ready_partitions_and_remove_grads"


def ranks(engine: Any) -> Sequence[int]:
    """The global ranks that reduce gradients with this one."""
    import torch.distributed as dist

    group = getattr(engine, "seq_data_parallel_group", None) or engine.data_parallel_group
    return [int(rank) for rank in dist.get_process_group_ranks(group)]


def dividing_by_micro_steps(engine: Any) -> AbstractContextManager[None]:
    """Let ``engine.backward`` divide the loss by gradient_accumulation_steps, as outside.

    Up to 0.18.2 it leaves that out under no_sync; from 0.18.3 it never does.
    """
    if engines.has_torch_style_backward(engine):
        return nullcontext()
    return meanwhile(engine, inside_no_sync_ctxt=False)


def must_scale(engine: Any) -> None:
    """Raises RuntimeError for a plain backward in fp16 where it does not: up to 0.18.2."""
    if engine.fp16_enabled() and not engines.has_torch_style_backward(engine):
        raise RuntimeError(
            "backward() of a tensor in fp16: this DeepSpeed scales a loss in engine.backward() "
            "alone. Call engine.backward(tensor) instead."
        )


def steps_now(engine: Any) -> bool:
    """Whether ``step`` would update the parameters: not at a micro step."""
    managed = getattr(engine, "managed_gradient_accumulation", None)  # 0.19.4
    if managed is not None and not managed():
        return True
    return bool(engine.is_gradient_accumulation_boundary())


@contextmanager
def at_boundary(engine: Any) -> Iterator[None]:
    """Let engine and optimizer take what is reduced here for the last of its step."""
    asked = engine._is_gradient_accumulation_boundary
    engine._is_gradient_accumulation_boundary = True
    _tell_optimizer(engine.optimizer, True)
    try:
        yield
    finally:
        restore_boundary(engine, asked)


def restore_boundary(engine: Any, asked: bool | None) -> None:
    """Put back what the user had set, or None for DeepSpeed's own count."""
    engine._is_gradient_accumulation_boundary = asked
    _tell_optimizer(engine.optimizer, engine.is_gradient_accumulation_boundary())


def _tell_optimizer(optimizer: Any, boundary: bool) -> None:
    if hasattr(optimizer, "set_gradient_accumulation_boundary"):  # 0.19.5
        optimizer.set_gradient_accumulation_boundary(boundary)
    else:
        optimizer.is_gradient_accumulation_boundary = boundary


def forget_last_step(engine: Any) -> None:
    """Do the clean-up that the forward after a reduction does, unless it was done.

    From 0.18.5 it is left to that forward. A block whose first backward runs over an older
    forward would lose its gradients to it, or find the last step's in their place.
    """
    optimizer = engine.optimizer
    if getattr(optimizer, "_epilogue_ran_this_backward", False):
        optimizer.clear_backward_seen_flag()


def forget_backward(engine: Any) -> None:
    """Clear what a backward that raised left behind in the engine."""
    engines.forget_backward(engine)
    # A timer that an exception left running refuses to be started again.
    for timer in getattr(engine.timers, "timers", {}).values():
        if timer.started_:
            timer.stop()
