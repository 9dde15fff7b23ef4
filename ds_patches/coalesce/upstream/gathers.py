"""Stage 3: who is gathered, who gathers, and how to stop it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ds_patches.runtime.attributes import Shadow, meanwhile
from ds_patches.runtime.coordinator import after_gathers, arrive, in_flight, private, private_name
from ds_patches.runtime.device import wait_for_current


def why_not(engine: Any) -> str | None:
    """Why gathering once is not known to be right, if it is not."""
    if not engine.zero_optimization_partition_weights():
        return "gather_once needs ZeRO stage 3: below it nothing is gathered"
    # ZeRO++ hpZ: a backward gathers from a copy that the forward's release makes.
    if engine.zero_hpz_partition_size() > 1:
        return "gather_once does not cover zero_hpz_partition_size > 1"
    offload = engine.zero_offload_param()
    if offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme":
        return "gather_once does not cover parameters on NVMe"
    return None


def why_not_unasked(engine: Any) -> str | None:
    """The same where nobody has asked for it. By configuration and model, so alike on all ranks."""
    if (reason := why_not(engine)) is not None:
        return reason
    offload = engine.optimizer.parameter_offload
    coordinator = offload.get_param_coordinator()
    if getattr(coordinator, "fast_sharding_for_leaf_module", False):  # 0.16.6
        return "gather_once was not tested with stage3_module_granularity_threshold"
    if coordinator.zero_quantized_weights or coordinator.zero_quantized_nontrainable_weights:
        return "gather_once was not tested with quantized weights"
    # As the coordinator counts what is live: elements of any dtype, persistent ones, no padding.
    elements = sum(param.ds_numel for param in offload.module.parameters())
    most = int(private(coordinator, "max_n_available_params"))
    if elements > most:
        return f"{elements} elements are more than stage3_max_live_parameters, {most}"
    return None


def gather(offload: Any) -> None:
    """Gather what is not, in an order that is the same on all ranks. A collective if there is any.

    It is usable behind the current stream.

    At most two prefetch buckets are on their way at a time, each in a buffer of its own.
    """
    coordinator = offload.get_param_coordinator()
    previous = list(in_flight(coordinator))  # prefetched
    longest = int(private(coordinator, "prefetch_bucket_sz"))
    chunks = list(_chunks(offload.module.parameters(), longest))
    if not previous and not chunks:
        return
    wait_for_current(
        private(coordinator, "allgather_stream")
    )  # a step has just written the partitions
    for chunk in chunks:
        private(coordinator, "all_gather_params")(chunk, forward=True)
        arrive(coordinator, previous)
        previous = chunk
    arrive(coordinator, previous)
    after_gathers(coordinator)


def hold(offload: Any) -> list[Shadow]:
    """Let nothing be released until the shadows are removed, but by who partitions everything."""
    coordinator = offload.get_param_coordinator()
    name = private_name("release_param")
    release = getattr(coordinator, name)

    def everything(wrapped: Any, *args: Any, **kwargs: Any) -> None:
        with meanwhile(coordinator, **{name: release}):
            wrapped(*args, **kwargs)

    return [
        Shadow(coordinator, name, lambda *_, **__: None),
        # It keeps its answers, and would answer by what a block holds.
        Shadow(coordinator, private_name("params_to_release"), lambda *_, **__: set()),
        Shadow(coordinator, "release_and_reset_all", everything),
    ]


def keep_trace(offload: Any) -> Shadow:
    """Forwards without hooks add nothing to it, and end none of its turns."""
    return Shadow(offload.get_param_coordinator(), "reset_step", lambda *_: None)


def release(offload: Any) -> None:
    """Partition what is gathered, but for the persistent and the external parameters."""
    coordinator = offload.get_param_coordinator()
    for param in offload.module.parameters():
        if not param.ds_persist and not param.is_external_param:
            private(coordinator, "release_param")(param)


def reset(offload: Any) -> None:
    """Begin a new trace, after a forward or backward that raised; all is partitioned already.

    A trace that was being recorded ends in the middle; on another rank it may end elsewhere.
    """
    coordinator = offload.get_param_coordinator()
    if not coordinator.is_complete_trace() and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    for module in offload.module.modules():
        # Gathers and releases that the backward still owed: the next forward counts from zero.
        for count in ("ds_grads_remaining", "applied_pre_backward_ref_cnt"):
            if count in vars(module):
                setattr(module, count, 0)


def _chunks(params: Iterable[Any], numel: int) -> Iterator[list[Any]]:
    """Parameters that are partitioned, up to `numel` elements together, or one that is larger."""
    chunk: list[Any] = []
    size = 0
    for param in params:
        if param.ds_status.name != "NOT_AVAILABLE":
            continue
        if chunk and size + param.ds_numel > numel:
            yield chunk
            chunk, size = [], 0
        chunk.append(param)
        size += param.ds_numel
    if chunk:
        yield chunk
