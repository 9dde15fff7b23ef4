"""The wrappers around DeepSpeed's functions, and the engines that they cover."""

import inspect
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from ds_patches.core import engines
from ds_patches.core.calls import Args, Kwargs, Wrapped, in_order
from ds_patches.steps.attached import Attached
from ds_patches.upstream import deepcompile, zero3
from ds_patches.upstream.coverage import is_deep_compiled, why_no_fallback

from . import dynamo
from .fallback import Fallback

logger = logging.getLogger("ds_patches.dc_fallback")

_compiled_engines: WeakSet[Any] = WeakSet()  # compiled while the patch was applied


def activate() -> Sequence[str]:
    """Cover the engines that were compiled while the patch was applied; report the others."""
    compiled = filter(is_deep_compiled, [*engines.known])
    uncovered = sum(_cover(engine) is None for engine in compiled)
    return [f"{uncovered} engine(s) compiled before: left to stock DeepSpeed"] if uncovered else []


def deactivate() -> None:
    """Remove the wrappers from every engine."""
    for _, fallback in _engines.detach_all():
        fallback.remove()


def _cover(engine: Any) -> Fallback | None:
    """Return the fallback of a compiled engine, made if needed; None if it has none."""
    if not is_deep_compiled(engine) or not engine.zero_optimization_partition_weights():
        return None
    return _engines(engine)


def _fallback_of(engine: Any) -> Fallback | None:
    """Return a new fallback of a compiled engine; None, with a warning, if it is not covered."""
    reason = why_no_fallback(engine)
    if reason is None and engine not in _compiled_engines:
        reason = "it was compiled before the patch was applied"
    if reason is not None:
        if reason:
            logger.warning("dc_fallback leaves this engine to stock DeepSpeed: %s.", reason)
        return None
    return Fallback(engine)


_engines: Attached[Fallback] = Attached("dc_fallback", _fallback_of)


# --- DeepSpeedEngine ----------------------------------------------------------------------------


def around_compile(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compile with frames that Dynamo skips gathering and training their parameters."""
    makes_graphs = engine.is_deepcompile_enabled() and not engine.is_compiled
    is_stage3 = engine.zero_optimization_partition_weights()
    if not (makes_graphs and is_stage3 and why_no_fallback(engine) is None):
        result = wrapped(*args, **kwargs)
        _cover(engine)
        return result
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    torch_backend = dynamo.find_backend(bound.arguments["backend"])
    wrap_backend = partial(_watched_backend, ref(engine), torch_backend)
    with deepcompile.compiling_engine(engine, wrap_backend):
        result = wrapped(*args, **kwargs)
    _compiled_engines.add(engine)
    _cover(engine)
    return result


def _watched_backend(engine_ref: Wrapped, by_torch: Wrapped, compile_graph: Wrapped) -> Wrapped:
    """Return DeepCompile's backend, with graphs that run through the engine's `Fallback`.

    by_torch: PyTorch's own backend, for graphs without parameters. DeepCompile makes all ranks
        compile a graph together, but they may see different shapes, as an activation function in a
        loop over the experts that were used. A graph without inputs, as Dynamo makes where a frame
        builds a module, fails an assertion of DeepCompile's prefetch.
    """
    # Without these guards Dynamo is off in submodules, and such loops are not compiled.
    guards_layers = deepcompile.guards_layer_parameters()

    def backend(gm: Any, inputs: Any) -> Any:
        if not inputs or (guards_layers and not any(hasattr(tensor, "ds_id") for tensor in inputs)):
            graph = by_torch(gm, inputs)
        else:
            with deepcompile.compiling_graph(gm):
                graph = compile_graph(gm, inputs)
        graph_id = id(gm.graph)  # as DeepCompile's

        def run(*inputs: Any) -> Any:
            engine = engine_ref()  # None if it was freed, and its model still runs
            if engine is None or (fallback := _engines.get(engine)) is None:
                return graph(*inputs)
            return fallback.run_graph(graph_id, graph, inputs)

        return run

    return backend


# --- GatheredParameters -------------------------------------------------------------------------


def around_gathered(wrapped: Wrapped, context: Any, args: Args, kwargs: Kwargs) -> Any:
    """Replace gathered tensors of eager code by their parameters."""
    params, *others = in_order(wrapped, args, kwargs)
    return wrapped(_params_of(params), *others)


def _params_of(params: Any) -> Any:
    fallbacks = [fallback for _, fallback in _engines.all()]
    if not any(fallback.uses.calls for fallback in fallbacks):
        return params

    import torch

    if isinstance(params, torch.Tensor):
        for fallback in fallbacks:
            if (param := fallback.uses.param_of(params)) is not None:
                return param
        return params
    return [_params_of(param) for param in params]


def around_enter(wrapped: Wrapped, context: Any, args: Args, kwargs: Kwargs) -> Any:
    """Mark the parameters of a ``GatheredParameters`` as in use by the script."""
    result = wrapped(*args, **kwargs)
    for param in context.params if context.enabled else ():
        setattr(param, zero3.IN_CONTEXT, True)
    return result


def around_exit(wrapped: Wrapped, context: Any, args: Args, kwargs: Kwargs) -> Any:
    """Remove the mark of a ``GatheredParameters`` from its parameters."""
    for param in context.params if context.enabled else ():
        vars(param).pop(zero3.IN_CONTEXT, None)
    return wrapped(*args, **kwargs)
