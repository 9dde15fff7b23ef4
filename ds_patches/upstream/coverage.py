"""Which engines a patch covers, and the reason for each that it does not."""

import sys
from typing import Any

from ds_patches.upstream.classes import (
    COORDINATOR,
    OPTIMIZERS,
    ZERO3,
    ZERO12,
    class_of,
    is_fp16_wrapper,
    private,
)

# --- Compiled engines -----------------------------------------------------------------------------


def _compiled_autograd_enabled() -> bool:
    # Looked up in sys.modules: importing Dynamo takes seconds, and it is off until imported.
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled_autograd, "compiled_autograd_enabled", False))


def is_compiled(engine: Any) -> bool:
    """Return True after ``engine.compile()``, or if compiled autograd is enabled."""
    return bool(engine._is_compiled) or _compiled_autograd_enabled()


def is_deep_compiled(engine: Any) -> bool:
    """Return True if DeepCompile's graphs gather and reduce (0.16.6 and later)."""
    is_active = getattr(engine, "is_deepcompile_active", None)
    if is_active is not None:
        return bool(is_active())
    is_enabled = getattr(engine, "is_deepcompile_enabled", None)
    return is_enabled is not None and bool(is_enabled() and engine.is_compiled)


def compiles_backward(engine: Any) -> bool:
    """Return True if a compiler runs the engine's backwards, and Python hooks do not run."""
    enabled = getattr(engine, "_is_compiled_autograd_enabled", False)
    return bool(enabled) or _compiled_autograd_enabled() or is_deep_compiled(engine)


# --- Reasons --------------------------------------------------------------------------------------


def why_not_covered(engine: Any) -> str | None:
    """Return None if `accumulation` covers the engine; else a reason to warn of, or ""."""
    optimizer = engine.optimizer
    if not engine.zero_optimization() or not hasattr(optimizer, "step"):
        return ""  # no ZeRO, or inference only
    if engine.pipeline_parallelism:
        return ""  # its schedule runs one backward at a time
    if is_fp16_wrapper(optimizer):
        return ""  # stage 1 with fp32 sums, 0.17.6 to 0.18.4: nothing is partitioned
    if getattr(engine, "zenflow", False):
        return "ZenFlow moves parameters and gradients by its own code"
    if class_of(optimizer) not in OPTIMIZERS:
        return f"its optimizer is {type(optimizer).__name__}, which reduces by its own code"
    return None


def why_no_block(engine: Any) -> str | None:
    """Return why the engine cannot have a ``coalesce_grad_reduction()`` block, or None."""
    optimizer = engine.optimizer
    if (stage := int(engine.zero_optimization_stage())) not in (1, 2, 3):
        return f"requires ZeRO stage 1/2/3; this engine has stage {stage}"
    if engine.pipeline_parallelism:
        return "is not supported under pipeline parallelism"
    if getattr(engine, "zenflow", False):
        return "does not cover ZenFlow: it moves gradients by its own code"
    if class_of(optimizer) not in (ZERO12, ZERO3):
        name = type(optimizer).__name__
        return f"does not cover the optimizer wrapper {name}: it takes gradients past ZeRO's hooks"
    if getattr(optimizer, "swap_optimizer", False):
        return "does not cover an optimizer offloaded to NVMe: it swaps within each backward"
    if is_deep_compiled(engine):
        return "does not cover DeepCompile: its graphs reduce by themselves"
    folding = getattr(engine, "_autoep_folding_spec", None)
    if folding is not None and folding.tp_size > 1:
        return "does not cover AutoEP folding: its tensor parallel correction is per backward"
    return None


def why_not_gather_once(engine: Any) -> str | None:
    """Return why an engine's parameters are not gathered once, or None.

    Depends on settings and the model alone, so the answer is the same on all ranks.
    """
    # ZeRO++ hpZ: a backward gathers from the secondary partition, which a release fills.
    if engine.zero_hpz_partition_size() > 1:
        return "zero_hpz_partition_size"
    if getattr(engine.zero_offload_param(), "device", None) == "nvme":
        return "parameters on NVMe"
    offload = engine.optimizer.parameter_offload
    coordinator = offload.get_param_coordinator()
    if getattr(coordinator, "fast_sharding_for_leaf_module", False):  # 0.16.6
        return "stage3_module_granularity_threshold"
    if coordinator.zero_quantized_weights or coordinator.zero_quantized_nontrainable_weights:
        return "quantized weights"
    # Counted as the coordinator counts live parameters: elements of any dtype, no padding.
    elements = sum(param.ds_numel for param in offload.module.parameters())
    max_live = int(private(COORDINATOR, coordinator, "max_n_available_params"))
    if elements > max_live:
        return f"{elements} elements are more than stage3_max_live_parameters, {max_live}"
    return None


def why_no_fallback(engine: Any) -> str | None:
    """Return why dc_fallback does not cover the engine, or None; "" for no warning."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp16_groups"):
        return ""  # no optimizer: nothing is trained, and ZeRO gathers what eager code reads
    if getattr(optimizer, "offload_optimizer", False):
        return "an offloaded optimizer needs ZeRO's own reduction, which DeepCompile removes"
    config = engine._config.zero_config
    if config.zero_quantized_weights or config.zero_quantized_gradients:
        return "quantized weights or gradients (ZeRO++) have a layout that it does not support"
    if config.zero_hpz_partition_size > 1 or getattr(config, "mics_shard_size", 0) > 0:
        return "secondary partitions (hpZ, MiCS) have a layout that it does not support"
    if getattr(optimizer, "sequence_parallel_size", 1) > 1:
        return "under sequence parallelism gradients are averaged over fewer ranks than reduce them"
    from torch.distributed import get_world_size as size

    groups = (p.ds_process_group for p in engine.module.parameters() if hasattr(p, "ds_id"))
    if any(size(group) != size(optimizer.dp_process_group) for group in groups):
        return "some parameters (AutoEP's experts) are averaged over more ranks than reduce them"
    if getattr(config.offload_param, "device", None) == "nvme":
        return "parameters on NVMe are swapped in by ZeRO's hooks, which DeepCompile removes"
    return None
