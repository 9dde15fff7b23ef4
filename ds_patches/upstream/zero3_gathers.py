"""Stage 3: who is gathered, who gathers, and how to stop it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ds_patches.core.calls import Args, Kwargs, Wrapped, meanwhile
from ds_patches.core.layer import Layer
from ds_patches.upstream import places
from ds_patches.upstream.accelerator import accelerator, keeps_order, wait_for_current

#: Among the modules that use a parameter: a script's block.
_BLOCK = "GatheredParameters"


def why_not_once(engine: Any) -> str | None:
    """Why a block gathers as DeepSpeed does; by settings and model, so alike on all ranks."""
    # ZeRO++ hpZ: a backward gathers from a copy that the forward's release makes.
    if engine.zero_hpz_partition_size() > 1:
        return "zero_hpz_partition_size"
    given = engine.zero_offload_param()
    if given is not None and str(getattr(given.device, "value", given.device)) == "nvme":
        return "parameters on NVMe"
    offload = engine.optimizer.parameter_offload
    coordinator = offload.get_param_coordinator()
    if getattr(coordinator, "fast_sharding_for_leaf_module", False):  # 0.16.6
        return "stage3_module_granularity_threshold"
    if coordinator.zero_quantized_weights or coordinator.zero_quantized_nontrainable_weights:
        return "quantized weights"
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


def hold(offload: Any) -> list[Layer]:
    """Let nothing be released until the layers are removed, but by who partitions everything."""
    coordinator = offload.get_param_coordinator()
    name = private_name("release_param")
    release = getattr(coordinator, name)

    def everything(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> None:
        with meanwhile(coordinator, **{name: release}):
            wrapped(*args, **kwargs)

    return [
        Layer(coordinator, name, lambda *_: None),
        # It keeps its answers, and would answer by what a block holds.
        Layer(coordinator, private_name("params_to_release"), lambda *_: set()),
        Layer(coordinator, "release_and_reset_all", everything),
    ]


def hold_in_block(offload: Any, params: Iterable[Any]) -> None:
    """Let modules that run not release what a script has gathered, until `let_go`."""
    coordinator = offload.get_param_coordinator()
    if not getattr(coordinator, "fast_sharding_for_leaf_module", False):  # it asks nobody
        for param in params:
            param.ds_active_sub_modules.add(_BLOCK)


def let_go(params: Iterable[Any]) -> None:
    for param in params:
        param.ds_active_sub_modules.discard(_BLOCK)


def keep_trace(offload: Any) -> Layer:
    """Forwards without hooks add nothing to it, and end none of its turns."""
    return Layer(offload.get_param_coordinator(), "reset_step", lambda *_: None)


def release(offload: Any) -> None:
    """Partition what is gathered, or on its way to be, and need not stay so.

    The persistent stay, the external, and, as the coordinator has it, those of a running module.
    """
    coordinator = offload.get_param_coordinator()
    if pending := list(in_flight(coordinator)):
        arrive(coordinator, pending)
        after_gathers(coordinator)
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


# --- what the coordinator of parameters keeps to itself ------------------------------------------


def private_name(name: str) -> str:
    """Return what `name`, written with two underscores in the class, is called outside."""
    return places.private_name("PartitionedParameterCoordinator", name)


def private(coordinator: Any, name: str) -> Any:
    """Return that attribute."""
    return getattr(coordinator, private_name(name))


def in_flight(coordinator: Any) -> dict[Any, Any]:
    """Parameters whose gather was begun and nobody has waited for, and what to wait for."""
    found: dict[Any, Any] = private(coordinator, "inflight_param_registry")
    return found


def arrive(coordinator: Any, params: Iterable[Any]) -> None:
    """Wait for the gathers of these, on the stream of the gathers."""
    pending = in_flight(coordinator)
    with accelerator().stream(private(coordinator, "allgather_stream")):
        for param in params:
            pending.pop(param).wait()


def after_gathers(coordinator: Any) -> None:
    """What the current stream does next comes after those that arrived."""
    if not keeps_order():
        accelerator().current_stream().wait_stream(private(coordinator, "allgather_stream"))


@contextmanager
def renumbered(coordinator: Any) -> Iterator[None]:
    """Modules get other numbers meanwhile, by which an unfinished trace has to know them then."""
    order = private(coordinator, "submodule_order")
    modules = {_number(module): module for module in order}
    yield
    if coordinator.is_record_trace():
        steps = private(coordinator, "step_id_module_fetched_for")
        before = {module: steps.pop(number, ()) for number, module in modules.items()}
        for module, fetched in before.items():
            steps[_number(module)].extend(fetched)


def _number(module: Any) -> int:
    """Return the number of a module, which 0.16.4 renamed."""
    number: int = vars(module)["ds_id" if "ds_id" in vars(module) else "id"]
    return number
