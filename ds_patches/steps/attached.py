"""What patches know of each engine or optimizer: it lies in the object's own `__dict__`.

Of every engine `accumulation` keeps its steps. Other patches ask for them, and require it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

from ds_patches.core import engines
from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.layer import Layer
from ds_patches.steps.step import EngineSteps
from ds_patches.steps.sums import GradientSum
from ds_patches.upstream import boundary as upstream_boundary
from ds_patches.upstream import coverage
from ds_patches.upstream import engine as upstream_engine

logger = logging.getLogger("ds_patches.accumulation")

_STEPS_FROM_OLDER = (
    "engine.step() of an engine whose parameters another engine has trained since: deepspeed."
    "initialize() was called on this model twice. Each steps from its own copy of the weights, and "
    "what the other has learned is lost, unless a checkpoint was loaded. Train one of them alone."
)

State = TypeVar("State")


class Attached(Generic[State]):
    """State that is made for an object when the patch first sees it, and dies with the object.

    make: returns what there is to know of an object; None leaves the object to stock.
    """

    def __init__(self, patch: str, make: Callable[[Any], State | None]) -> None:
        self.key, self._make = f"_ds_patches_{patch}", make
        self._objects: WeakSet[Any] = WeakSet()
        self._parts: WeakSet[Any] = WeakSet()

    def __call__(self, thing: Any) -> State | None:
        """Return the state of `thing`, which is made if there is none."""
        here = vars(thing)
        if self.key not in here:
            here[self.key] = self._make(thing)
            self._objects.add(thing)
        state: State | None = here[self.key]
        return state

    def get(self, thing: Any) -> State | None:
        """Return the state of `thing`, if it was made."""
        state: State | None = vars(thing).get(self.key)
        return state

    def share(self, part: Any, state: State) -> None:
        """Have `get` answer for a part of an object, too."""
        vars(part)[self.key] = state
        self._parts.add(part)

    def leave(self, thing: Any) -> None:
        """Leave an object to stock from now on, whatever was known of it."""
        state = vars(thing).get(self.key)
        vars(thing)[self.key] = None
        self._objects.add(thing)
        for part in self._parts if state is not None else ():
            if vars(part).get(self.key) is state:
                vars(part)[self.key] = None

    def all(self) -> list[tuple[Any, State]]:
        """Return every object that is not left to stock, with its state."""
        found = [(thing, self.get(thing)) for thing in self._objects]
        return [(thing, state) for thing, state in found if state is not None]

    def detach_all(self) -> list[tuple[Any, State]]:
        """Take the state from every object; return what `all` was."""
        found = self.all()
        for one in (*self._objects, *self._parts):
            vars(one).pop(self.key, None)
        self._objects.clear()
        self._parts.clear()
        return found


#: Returns what adds up the gradients of an engine's steps; None leaves the engine to stock.
SumOf = Callable[[Any], GradientSum | None]
_sum_of: SumOf | None = None
#: What other patches make of an engine listens to its steps.
_subscribers: list[Attached[Any]] = []


def _steps_of(engine: Any) -> EngineSteps | None:
    if _sum_of is None or (sum_ := _sum_of(engine)) is None:
        return None
    steps = EngineSteps(engine, sum_)
    _engines.share(engine.optimizer, steps)
    if (state := upstream_engine.hook_state(engine.optimizer)) is not None:
        _engines.share(state, steps)
    for subscriber in _subscribers:
        _listen(subscriber, engine, steps)
    return steps


_engines: Attached[EngineSteps] = Attached("accumulation", _steps_of)
#: Engines whose backwards compiled autograd compiles.
_eager: Attached[bool] = Attached("eager_prologue", upstream_engine.disable_dynamo_for_prologue)
#: In the `__dict__` of engines that were taken in, or left to stock.
KEY = _engines.key


def keep(sum_of: SumOf) -> None:
    """Keep the steps of engines from their next forward on."""
    global _sum_of
    _sum_of = sum_of


def of(owner: Any) -> EngineSteps | None:
    """Return what is kept of an engine, or of its optimizer; None if it is left to stock."""
    return _engines.get(owner)


def take_in(engine: Any) -> EngineSteps | None:
    """Return what is kept of an engine, from its first forward on; None if it is left to stock.

    An engine whose backwards a compiler compiles is left, from the compilation on. A step that
    began before the patch is left until it ends.
    """
    if coverage.is_compiled(engine) and coverage.compiles_backward(engine):
        if (steps := of(engine)) is not None:
            steps.detach()
        _engines.leave(engine)
        _eager(engine)
    return None if waits(engine) else _engines(engine)


def waits(engine: Any) -> bool:
    """Whether the running step began on stock, which is to end it."""
    return KEY not in vars(engine) and upstream_boundary.is_in_a_step(engine)


def of_optimizer(optimizer: Any) -> EngineSteps | None:
    """Return what is kept of an optimizer's engine, also before its first forward."""
    if KEY not in vars(optimizer):
        _engines.leave(optimizer)  # if it has none: to look for it takes a while
        for engine in [*engines.known]:
            if vars(engine).get("optimizer") is optimizer:
                take_in(engine)
    return of(optimizer)


# --- Engines that train the same parameters -------------------------------------------------------
#
# ``initialize`` was called again on a model, or a part of it. The hooks of the older engine stay,
# unless its ``destroy()`` is called; and its optimizer steps from a copy of the weights. Stock puts
# each gradient into the buckets of both, and each reduces it.

#: Of each engine, how many there had been when it was looked at, and those that share a parameter.
_rivals: WeakKeyDictionary[Any, tuple[int, list[ref[Any]]]] = WeakKeyDictionary()
#: Those that a rival has stepped since their last step; False: it was said.
_overtaken: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
#: How many engines there had been when they were kept apart.
counted = 0


def keep_apart() -> None:
    """Keep engines of the same parameters from taking gradients of each other's backwards."""
    global counted
    counted = engines.count
    for engine in [*engines.known]:
        if _living_rivals(engine):
            _apart(engine)


def _layers_at_hooks(engine: Any) -> list[Layer]:
    around = partial(_around_hook, ref(engine))
    methods = upstream_engine.methods_of_hooks(engine.optimizer)
    return [Layer(engine.optimizer, name, around) for name in methods]


#: Of engines that have rivals: around what the hooks of their parameters call.
_apart: Attached[list[Layer]] = Attached("apart", _layers_at_hooks)


def _around_hook(engine: ref[Any], wrapped: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
    one = engine()
    return None if one is not None and _stands_by(one) else wrapped(*args, **kwargs)


def _stands_by(engine: Any) -> bool:
    """Whether the running backward is that of another engine alone."""
    steps = of(engine)
    if steps is None and (KEY in vars(engine) or waits(engine)):
        return False  # left to stock: nobody knows
    is_own = steps is not None and steps.watch.running
    theirs = [] if is_own else map(of, _living_rivals(engine))
    return any(one is not None and one.watch.running for one in theirs)


def _living_rivals(engine: Any) -> list[Any]:
    """Return the other engines that train a parameter of this one, as far as they are known."""
    found = _rivals.get(engine)
    if found is None or found[0] != engines.count:
        mine = upstream_engine.trained_ids(engine)
        others = (one for one in engines.known if one is not engine)
        shared = [ref(o) for o in others if not mine.isdisjoint(upstream_engine.trained_ids(o))]
        _rivals[engine] = found = engines.count, shared
    if not found[1]:  # as a rule, and asked in each step
        return []
    return [one for rival in found[1] if (one := rival()) is not None]


def has_stepped(engine: Any) -> None:
    """Have other engines of the same parameters told, once, that they step from older ones."""
    rivals = _living_rivals(engine)
    for one in rivals:
        _overtaken.setdefault(one, True)
    if rivals and _overtaken.get(engine):
        _overtaken[engine] = False
        logger.warning(_STEPS_FROM_OLDER)


def subscribe(subscriber: Attached[Any]) -> None:
    """Have a listener made of each engine that is known, and of each that comes."""
    _subscribers.append(subscriber)
    for engine, steps in _engines.all():
        _listen(subscriber, engine, steps)


def _listen(subscriber: Attached[Any], engine: Any, steps: EngineSteps) -> None:
    if (listener := subscriber(engine)) is not None:
        steps.listeners.append(listener)


def unsubscribe(subscriber: Attached[Any]) -> list[Any]:
    """Make no more, and take those from the engines that there are; returns them."""
    if subscriber in _subscribers:
        _subscribers.remove(subscriber)
    found = subscriber.detach_all()
    for engine, listener in found:
        if (steps := of(engine)) is not None:
            steps.listeners.remove(listener)
    return [listener for _, listener in found]


def detach_all() -> None:
    """Give every engine back to stock."""
    global _sum_of
    _sum_of = None
    _rivals.clear()
    _overtaken.clear()
    for engine, _ in _eager.detach_all():
        upstream_engine.restore_prologue(engine)
    for _, layers in _apart.detach_all():
        for layer in layers:
            layer.remove()
    for _, steps in _engines.detach_all():
        steps.detach()
