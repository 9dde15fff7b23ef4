"""The wrappers around DeepSpeed's functions, and the engines they have met."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
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

_compiled_here: WeakSet[Any] = WeakSet()


def activate() -> Sequence[str]:
    """Take in the engines that were compiled here; name what is out of reach."""
    compiled = filter(is_deep_compiled, [*engines.known])
    left = sum(_compiled(engine) is None for engine in compiled)
    return [f"{left} engine(s) compiled before: left to stock DeepSpeed"] if left else []


def deactivate() -> None:
    """Leave every engine as DeepCompile made it."""
    for _, state in _engines.detach_all():
        state.remove()


def _compiled(engine: Any) -> Fallback | None:
    """Take in an engine that was compiled; None if it is left to stock."""
    if not is_deep_compiled(engine) or not engine.zero_optimization_partition_weights():
        return None
    return _engines(engine)


def _take_in(engine: Any) -> Fallback | None:
    reason = why_no_fallback(engine)
    if reason is None and engine not in _compiled_here:
        reason = "it was compiled before the patch was applied"
    if reason is not None:
        if reason:
            logger.warning("dc_fallback leaves this engine to stock DeepSpeed: %s.", reason)
        return None
    return Fallback(engine)


_engines: Attached[Fallback] = Attached("dc_fallback", _take_in)


# --- DeepSpeedEngine ----------------------------------------------------------------------------


def around_compile(wrapped: Wrapped, engine: Any, args: Args, kwargs: Kwargs) -> Any:
    """DeepSpeed's compile: here frames that Dynamo skips gather their parameters, and train."""
    makes_graphs = engine.is_deepcompile_enabled() and not engine.is_compiled
    is_stage3 = engine.zero_optimization_partition_weights()
    if not (makes_graphs and is_stage3 and why_no_fallback(engine) is None):
        result = wrapped(*args, **kwargs)
        _compiled(engine)
        return result
    given = inspect.signature(wrapped).bind(*args, **kwargs)
    given.apply_defaults()
    alone = dynamo.backend(given.arguments["backend"])
    with deepcompile.compiling_engine(engine, partial(_watched_backend, ref(engine), alone)):
        result = wrapped(*args, **kwargs)
    _compiled_here.add(engine)
    _compiled(engine)
    return result


def _watched_backend(engine: Callable[[], Any], alone: Wrapped, compile_graph: Wrapped) -> Wrapped:
    """DeepCompile's backend, whose graphs run by way of what the patch knows of the engine.

    alone: PyTorch's own. DeepCompile has all ranks compile a graph together, which they do not
    where they see different shapes: of an activation function in a loop over the experts that were
    hit, say. It has no parameters, so there is nothing for DeepCompile to do. A graph without any
    input, as Dynamo makes one where a frame builds a module, fails an assertion of its prefetch.
    """
    apart = deepcompile.guards_layer_parameters()  # else nothing that such a loop calls is compiled

    def backend(gm: Any, inputs: Any) -> Any:
        if not inputs or (apart and not any(hasattr(tensor, "ds_id") for tensor in inputs)):
            graph = alone(gm, inputs)
        else:
            with deepcompile.compiling_graph(gm):
                graph = compile_graph(gm, inputs)
        graph_id = id(gm.graph)  # by which DeepCompile knows it

        def run(*inputs: Any) -> Any:
            living = engine()  # None once nobody holds it, and its model still runs
            state = None if living is None else _engines.get(living)
            return graph(*inputs) if state is None else state.run_graph(graph_id, graph, inputs)

        return run

    return backend


# --- GatheredParameters -------------------------------------------------------------------------


def around_gathered(wrapped: Wrapped, context: Any, args: Args, kwargs: Kwargs) -> Any:
    """``GatheredParameters`` of a gathered tensor that eager code has read: take its parameter."""
    params, *others = in_order(wrapped, args, kwargs)
    return wrapped(_params_of(params), *others)


def _params_of(given: Any) -> Any:
    states = [state for _, state in _engines.all()]
    if not any(state.uses.calls for state in states):
        return given

    import torch

    if isinstance(given, torch.Tensor):
        for state in states:
            if (param := state.uses.param_of(given)) is not None:
                return param
        return given
    return [_params_of(param) for param in given]


def around_enter(wrapped: Wrapped, context: Any, args: Args, kwargs: Kwargs) -> Any:
    """``GatheredParameters`` begins: the script itself holds these parameters from here on."""
    result = wrapped(*args, **kwargs)
    for param in context.params if context.enabled else ():
        setattr(param, zero3.IN_CONTEXT, True)
    return result


def around_exit(wrapped: Wrapped, context: Any, args: Args, kwargs: Kwargs) -> Any:
    """``GatheredParameters`` ends, and the script holds these parameters no more."""
    for param in context.params if context.enabled else ():
        vars(param).pop(zero3.IN_CONTEXT, None)
    return wrapped(*args, **kwargs)
