"""The targets and dependencies of activation_checkpointing. Data only."""

from ds_patches.core.patch import Class, Dependency, Patch, Target, upstream

_MODULE = "deepspeed.runtime.activation_checkpointing.checkpointing"
_NODE = Class(_MODULE, "CheckpointFunction")
_TARGETS = (
    Target(_MODULE, "checkpoint", "around_checkpoint"),
    Target(_MODULE, "non_reentrant_checkpoint", "around_non_reentrant"),
)

_EMPTIED = "empties a tensor that it offloads or partitions"

_DEPENDENCIES = (
    _NODE.needs("forward", "saves tensors and states in attributes of its node"),
    _NODE.needs("backward", "frees them when it has recomputed"),
    Dependency(_MODULE, "get_partitioned_activations_for_backward", _EMPTIED),
    Dependency(_MODULE, "get_cpu_activations_for_backward", _EMPTIED),
    Dependency(_MODULE, "CudaRNGStatesTracker", "draws from a dict of states, which it changes"),
)

PATCH = Patch(
    name="activation_checkpointing",
    summary="several backwards over one forward under deepspeed.checkpointing",
    remove_when="a release recomputes in each backward; none up to 0.19.8 does",
    upstream=upstream("issue 4595"),
    supported=">=0.16.0,<=0.19.8",
    targets=_TARGETS,
    dependencies=_DEPENDENCIES,
    requires=("accumulation",),
)
