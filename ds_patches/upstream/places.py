"""DeepSpeed's classes that bindings name methods of, where they are defined; private names."""

from __future__ import annotations

from typing import Any

from ds_patches.core.patch import Class

ENGINE = Class("deepspeed.runtime.engine", "DeepSpeedEngine")
#: What counts the gradients of a backward, 0.18.5 and later.
HOOK_STATE = Class("deepspeed.runtime.base_optimizer", "BackwardHookStateManager")

#: The optimizer of stages 1 and 2, and of stage 3.
ZERO12 = Class("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")
ZERO3 = Class("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
#: Stage 1 with bf16 parameters and fp32 gradients, which add up by themselves.
BF16 = Class("deepspeed.runtime.bf16_optimizer", "BF16_Optimizer")
#: Without ZeRO, fp16; from 0.17.6 to 0.18.4 also bf16 at stage 1 with fp32 gradients.
FP16 = Class("deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer")
FP16_UNFUSED = Class("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer")

#: Stage 3: the hooks of modules; who gathers; parameters, partitioned as they are made.
OFFLOAD = Class("deepspeed.runtime.zero.parameter_offload", "DeepSpeedZeRoOffload")
COORDINATOR = Class(
    "deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator"
)
INIT = Class("deepspeed.runtime.zero.partition_parameters", "Init")
#: What `INIT` is made of: it changes classes of PyTorch's for a while.
INIT_BASE = Class(INIT.module, "InsertPostInitMethodToModuleSubClasses")
GATHERED = Class(INIT.module, "GatheredParameters")

#: Releases that have ``loss.backward()`` without the engine, and those that have `HOOK_STATE`.
TORCH_STYLE = ">=0.18.3"
COUNTING = ">=0.18.5"


def private_name(owner: str, name: str) -> str:
    """Return what `name`, written with two underscores in a class called `owner`, is outside."""
    return f"_{owner.lstrip('_')}__{name}"


def private(thing: Any, owner: str, name: str) -> Any:
    """Return that attribute."""
    return getattr(thing, private_name(owner, name))
