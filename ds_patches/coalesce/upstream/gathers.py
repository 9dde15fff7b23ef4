"""Stage 3: who is gathered, who gathers, and how to stop it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ds_patches.runtime.device import accelerator, keeps_order, wait_for_current

_COORDINATOR = "_PartitionedParameterCoordinator__"
#: In a parameter's set of the modules that it is in use by; upstream's are numbers.
_HELD = "ds_patches.coalesce"


def must_be_covered(engine: Any) -> None:
    """Raise NotImplementedError where gathering once is not known to be right."""
    if not engine.zero_optimization_partition_weights():
        raise NotImplementedError("gather_once needs ZeRO stage 3: below it nothing is gathered")
    # ZeRO++ hpZ: a backward gathers from a copy that the forward's release makes.
    if engine.zero_hpz_partition_size() > 1:
        raise NotImplementedError("gather_once does not cover zero_hpz_partition_size > 1")
    offload = engine.zero_offload_param()
    if offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme":
        raise NotImplementedError("gather_once does not cover parameters on NVMe")


def parameters(offload: Any) -> list[Any]:
    """Every parameter, frozen ones too, in an order that is the same on all ranks."""
    return list(offload.module.parameters())


def gather(offload: Any, params: Iterable[Any]) -> None:
    """Gather what is not; usable behind the current stream. A collective.

    At most two prefetch buckets are on their way at a time, each in a buffer of its own.
    """
    coordinator = offload.get_param_coordinator()
    stream = _private(coordinator, "allgather_stream")
    wait_for_current(stream)  # a step has just written the partitions
    previous = list(_private(coordinator, "inflight_param_registry"))  # prefetched
    for chunk in _chunks(params, int(_private(coordinator, "prefetch_bucket_sz"))):
        _private(coordinator, "all_gather_params")(chunk, forward=True)
        _arrive(coordinator, previous)
        previous = chunk
    _arrive(coordinator, previous)
    if not keeps_order():
        accelerator().current_stream().wait_stream(stream)


def hold(offload: Any, params: Iterable[Any]) -> None:
    """Let no release reach them, and keep the trace: forwards without hooks add nothing to it."""
    for param in params:
        param.ds_active_sub_modules.add(_HELD)
    offload.get_param_coordinator().reset_step = lambda: None


def let_go(offload: Any, params: Iterable[Any]) -> None:
    """Allow releases again, and let forwards begin a new turn of the trace."""
    vars(offload.get_param_coordinator()).pop("reset_step", None)
    for param in params:
        param.ds_active_sub_modules.discard(_HELD)


def release(offload: Any) -> None:
    """Partition what is gathered, but for the persistent and the external parameters."""
    coordinator = offload.get_param_coordinator()
    for param in parameters(offload):
        if not param.ds_persist and not param.is_external_param:
            _private(coordinator, "release_param")(param)


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


def _arrive(coordinator: Any, params: Iterable[Any]) -> None:
    in_flight = _private(coordinator, "inflight_param_registry")
    with accelerator().stream(_private(coordinator, "allgather_stream")):
        for param in params:
            in_flight.pop(param).wait()


def _private(coordinator: Any, name: str) -> Any:
    return getattr(coordinator, _COORDINATOR + name)
