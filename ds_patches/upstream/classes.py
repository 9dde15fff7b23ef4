"""DeepSpeed's classes, by module and name, and the class of an engine's optimizer.

Optimizers are compared by exact class: a subclass, as ZenFlow's, reduces and steps differently.
"""

from typing import Any

from ds_patches.core.patch import Class

ENGINE = Class("deepspeed.runtime.engine", "DeepSpeedEngine")
#: Counts the gradients of a backward, 0.18.5 and later.
HOOK_STATE = Class("deepspeed.runtime.base_optimizer", "BackwardHookStateManager")

#: The optimizers of stages 1 and 2, and of stage 3.
ZERO12 = Class("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")
ZERO3 = Class("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
#: Stage 1 with bf16 parameters and fp32 gradients, which it accumulates itself.
BF16 = Class("deepspeed.runtime.bf16_optimizer", "BF16_Optimizer")
#: Without ZeRO, fp16; from 0.17.6 to 0.18.4 also bf16 at stage 1 with fp32 gradients.
FP16 = Class("deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer")
FP16_UNFUSED = Class("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer")
#: The optimizers with fp32 copies of the weights that the patches know.
OPTIMIZERS = (ZERO12, ZERO3, BF16, FP16, FP16_UNFUSED)

#: Stage 3: the module hooks; the all-gathers; ``zero.Init``, which partitions new parameters.
OFFLOAD = Class("deepspeed.runtime.zero.parameter_offload", "DeepSpeedZeRoOffload")
COORDINATOR = Class(
    "deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator"
)
INIT = Class("deepspeed.runtime.zero.partition_parameters", "Init")
#: The base class of `INIT`, which patches PyTorch's classes while it is entered.
INIT_BASE = Class(INIT.module, "InsertPostInitMethodToModuleSubClasses")
GATHERED = Class(INIT.module, "GatheredParameters")

#: Dependencies of a patch that gathers all parameters of a model once, and keeps them.
GATHER_ONCE_DEPENDENCIES = (
    COORDINATOR.needs("__all_gather_params", "gathers partitioned parameters, on its own stream"),
    COORDINATOR.needs("__release_param", "releases a parameter; wrapped while all are gathered"),
    COORDINATOR.needs("__params_to_release", "lists what a module may release; wrapped likewise"),
    COORDINATOR.needs("release_sub_module", "leaves every release to __release_param"),
    COORDINATOR.needs("release_and_reset_all", "partitions all parameters; wrapped likewise"),
    COORDINATOR.needs("reset_step", "compares the traces of all ranks at the next forward"),
    OFFLOAD.needs("_remove_module_hooks", "holds the handles of all hooks that gather"),
)

#: Releases where ``loss.backward()`` works without the engine, and releases with `HOOK_STATE`.
TORCH_STYLE = ">=0.18.3"
COUNTING = ">=0.18.5"


def private_name(owner: Class, name: str) -> str:
    """Return the mangled name of an attribute that a class writes with two underscores."""
    return f"_{owner.name}__{name}"


def private(owner: Class, instance: Any, name: str) -> Any:
    """Return an attribute that a class writes with two underscores."""
    return getattr(instance, private_name(owner, name))


def class_of(optimizer: Any) -> Class:
    """Return the exact class of an optimizer, to compare with the constants of this module."""
    kind = type(optimizer)
    return Class(kind.__module__, kind.__qualname__)


def is_fp16_wrapper(optimizer: Any) -> bool:
    """Return True if an optimizer is one of the two fp16 wrappers, which partition nothing."""
    return class_of(optimizer) in (FP16, FP16_UNFUSED)


def is_muon(optimizer: Any) -> bool:
    """Return True if an optimizer wraps Muon, which orthogonalises as a backward ends."""
    return "muon" in type(optimizer.optimizer).__name__.lower()


def makes_muon_updates_in_backward(optimizer: Any) -> bool:
    """Return True if stage 3 runs Muon's update in each backward: 0.18.9 to 0.19.7."""
    return is_muon(optimizer) and hasattr(optimizer, "_apply_distributed_muon_update")
