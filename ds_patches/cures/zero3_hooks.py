"""ZeRO-3 training after inference_mode, after generation without hooks, in mixed dtypes."""

from typing import Any

from ds_patches.core import api
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.core.patch import Patch, upstream
from ds_patches.upstream.classes import COORDINATOR, GATHERED, INIT, OFFLOAD

PATCH = Patch(
    name="zero3_hooks",
    summary="ZeRO-3 trains on after inference_mode, generation without hooks, mixed dtypes",
    remove_when="a release assigns no inference tensors to parameters; none up to 0.19.8 does",
    upstream=upstream("PR 8043", "PR 8073", "issue 8072"),
    supported=">=0.16.0,<=0.19.8",
    targets=(
        OFFLOAD.target("pre_sub_module_forward_function", "around_change"),
        OFFLOAD.target("post_sub_module_forward_function", "around_change"),
        COORDINATOR.target("reset_step", "around_change"),
        INIT.target("_all_gather", "around_change"),
        GATHERED.target("__exit__", "around_change"),
        OFFLOAD.target("_register_hooks_recursively", "around_register", "<=0.16.3"),
        OFFLOAD.target("_register_deepspeed_module", "around_register", ">=0.16.4,<=0.19.1"),
        INIT.target("_allgather_params_coalesced", "around_all_gather", "<=0.19.2"),
    ),
    dependencies=(
        COORDINATOR.needs("record_module", "records the trace by module ids", "<=0.19.1"),
        COORDINATOR.needs("record_parameters", "looks modules up by these ids", "<=0.19.1"),
    ),
)

apply, unapply, is_applied = api.of(__name__)


def around_change(wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    """Disable inference mode while DeepSpeed replaces parameters' data, which must be trainable."""
    import torch  # every command reads this file, and few need torch

    if not torch.is_inference_mode_enabled():
        return wrapped(*args, **kwargs)
    # As torch.inference_mode(False) does in less Python; its end restores the gradient mode.
    with torch._C._InferenceMode(False):
        torch._C._set_grad_enabled(False)
        return wrapped(*args, **kwargs)


def around_register(wrapped: Wrapped, offload: Any, args: Args, kwargs: Kwargs) -> Any:
    """Update the trace when the modules get new ids, as hooks are registered again."""
    from ds_patches.upstream.zero3_gathers import keeping_trace_ids

    module = in_order(wrapped, args, kwargs)[0]
    if module is not offload.module:
        return wrapped(*args, **kwargs)
    with keeping_trace_ids(offload.get_param_coordinator()):
        return wrapped(*args, **kwargs)


def around_all_gather(wrapped: Wrapped, init: Any, args: Args, kwargs: Kwargs) -> Any:
    """All-gather parameters of several dtypes one by one; DeepSpeed uses the first's dtype."""
    params, *rest = in_order(wrapped, args, kwargs)
    if len({param.ds_tensor.dtype for param in params}) < 2:
        return wrapped(*args, **kwargs)
    for param in params:
        wrapped([param], *rest)  # of several, DeepSpeed awaits only the last on CPU ranks
    return None
