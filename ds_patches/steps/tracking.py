"""The tracked engines, the patches' listeners of their steps, and engines of the same parameters.

`accumulation` tracks the steps of every engine. Patches that use them require `accumulation`.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from ds_patches.core import engines
from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.layer import Layer
from ds_patches.steps.attached import Attached
from ds_patches.steps.step import EngineSteps
from ds_patches.steps.sums import GradientSum
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import coverage
from ds_patches.upstream import engine as upstream_engine

logger = logging.getLogger("ds_patches.accumulation")

_STEPS_FROM_OLDER = (
    "engine.step() of an engine whose parameters another engine has trained since its last step: "
    "deepspeed.initialize() was called twice on this model. Each engine steps its own copy of the "
    "weights, so the other's updates are lost, unless a checkpoint was loaded. Train only one."
)

#: Returns the gradient sum of an engine, or None to exclude the engine; set by `accumulation`.
make_sum: Callable[[Any], GradientSum | None] | None = None
#: States of other patches, which are added to the listeners of each tracked engine.
_subscribers: list[Attached[Any]] = []


def _make_steps(engine: Any) -> EngineSteps | None:
    if make_sum is None or (sum_ := make_sum(engine)) is None:
        return None
    steps = EngineSteps(engine, sum_)
    _engines.set(engine.optimizer, steps)
    if (state := upstream_engine.hook_state(engine.optimizer)) is not None:
        _engines.set(state, steps)
    for subscriber in _subscribers:
        _listen(subscriber, steps)
    return steps


_engines: Attached[EngineSteps] = Attached("accumulation", _make_steps)
#: Engines whose backwards compiled autograd compiles, and whose prologue Dynamo must not compile.
_eager_prologues: Attached[bool] = Attached(
    "eager_prologue", upstream_engine.disable_dynamo_for_prologue
)
#: Returns the steps of a tracked engine, given the engine or its optimizer; else None.
steps_of = _engines.get
#: Key in the `__dict__` of tracked and of excluded engines, and of their optimizers.
KEY = _engines.key


def track(engine: Any) -> EngineSteps | None:
    """Track an engine from this forward on. Return its steps, or None if it is excluded.

    An engine is excluded once a compiler compiles its backwards. If the patch was applied in the
    middle of a step, the engine is tracked from the next step on.
    """
    if coverage.is_compiled(engine) and coverage.compiles_backward(engine):
        if (steps := steps_of(engine)) is not None:
            steps.detach()
        _engines.exclude(engine)
        _eager_prologues(engine)
    return None if began_on_stock(engine) else _engines(engine)


def began_on_stock(engine: Any) -> bool:
    """Return True if the patch was applied in the engine's running step, until that ends."""
    return KEY not in vars(engine) and upstream_boundary.is_in_a_step(engine)


def steps_of_optimizer(optimizer: Any) -> EngineSteps | None:
    """Return the steps of an optimizer's engine, also before its first forward; else None."""
    if KEY not in vars(optimizer):
        _engines.exclude(optimizer)  # so that an optimizer without an engine is searched for once
        for engine in [*engines.known]:
            if vars(engine).get("optimizer") is optimizer:
                track(engine)
    return steps_of(optimizer)


# --- Engines that train the same parameters -------------------------------------------------------
#
# ``deepspeed.initialize`` was called again on a model, or on a part of it. The gradient hooks of
# the older engine stay registered unless its ``destroy()`` is called, and its optimizer steps its
# own copy of the weights. Without patches each gradient goes into the buckets of both engines, and
# both reduce it.

#: By engine: the other known engines that train a parameter of it.
_rivals: WeakKeyDictionary[Any, list[ref[Any]]] = WeakKeyDictionary()
#: Engines that a rival has stepped since their own last step; False once the warning was logged.
_overtaken: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
#: `engines.count` when `separate_rivals` last ran.
checked_engine_count = 0


def separate_rivals() -> None:
    """Make engines of the same parameters ignore the gradients of each other's backwards."""
    global checked_engine_count
    checked_engine_count = engines.count
    trained = {engine: upstream_engine.trained_ids(engine) for engine in engines.known}
    for engine, params in trained.items():
        others = (other for other in trained if other is not engine)
        rivals = [ref(other) for other in others if not params.isdisjoint(trained[other])]
        _rivals[engine] = rivals
        if rivals:
            _hook_layers(engine)


def _wrap_hook_methods(engine: Any) -> list[Layer]:
    """Wrap the optimizer's methods that the parameters' gradient hooks call."""
    around = partial(_around_hook, ref(engine))
    methods = upstream_engine.methods_of_hooks(engine.optimizer)
    return [Layer(engine.optimizer, name, around) for name in methods]


#: By engine that has rivals: the wrappers of the methods that its parameters' hooks call.
_hook_layers: Attached[list[Layer]] = Attached("apart", _wrap_hook_methods)


def _around_hook(engine_ref: ref[Any], wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    engine = engine_ref()
    ignored = engine is not None and _ignores_backward(engine)
    return None if ignored else wrapped(*args, **kwargs)


def _ignores_backward(engine: Any) -> bool:
    """Return True if the running backward belongs to another engine, and not to this one."""
    steps = steps_of(engine)
    if steps is None and (KEY in vars(engine) or began_on_stock(engine)):
        return False  # its backwards are not tracked, so the running one may be its own
    is_own = steps is not None and steps.watch.running
    rivals = [] if is_own else map(steps_of, _rivals_of(engine))
    return any(rival is not None and rival.watch.running for rival in rivals)


def _rivals_of(engine: Any) -> list[Any]:
    """Return the other known engines that train a parameter of this one."""
    if checked_engine_count != engines.count:
        separate_rivals()
    if refs := _rivals.get(engine):
        return [rival for rival_ref in refs if (rival := rival_ref()) is not None]
    return []


def note_step(engine: Any) -> None:
    """Warn once if this engine steps from older weights than a rival has trained since."""
    rivals = _rivals_of(engine)
    for rival in rivals:
        _overtaken.setdefault(rival, True)
    if rivals and _overtaken.get(engine):
        _overtaken[engine] = False
        logger.warning(_STEPS_FROM_OLDER)


def subscribe(subscriber: Attached[Any]) -> None:
    """Make a listener for each tracked engine, and for each that is tracked later."""
    _subscribers.append(subscriber)
    for steps in _all_steps():
        _listen(subscriber, steps)


def _all_steps() -> set[EngineSteps]:
    return {steps for _, steps in _engines.all()}


def _listen(subscriber: Attached[Any], steps: EngineSteps) -> None:
    if (listener := subscriber(steps.engine)) is not None:
        steps.listeners.append(listener)


def unsubscribe(subscriber: Attached[Any]) -> list[Any]:
    """Remove a subscriber's listeners from all engines, and make no more. Return them."""
    if subscriber in _subscribers:
        _subscribers.remove(subscriber)
    listeners = {listener for _, listener in subscriber.detach_all()}
    for steps in _all_steps():
        steps.listeners = [other for other in steps.listeners if other not in listeners]
    return [*listeners]


def detach_all() -> None:
    """Stop tracking every engine."""
    global make_sum, checked_engine_count
    make_sum, checked_engine_count = None, 0
    _rivals.clear()
    _overtaken.clear()
    for engine, _ in _eager_prologues.detach_all():
        upstream_engine.restore_prologue(engine)
    for _, layers in _hook_layers.detach_all():
        for layer in layers:
            layer.remove()
    for steps in _all_steps():
        steps.detach()
    _engines.detach_all()
