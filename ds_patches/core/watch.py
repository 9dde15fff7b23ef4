"""What is looked at when an engine is built and at its steps, while any patch is applied.

Whether all ranks have the same patches; and whether another library has put something in the
place of a function that a patch wraps: at a class, at one engine, or in a subclass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ds_patches.core import agreement, imports, lifecycle, live
from ds_patches.core.journal import Journal
from ds_patches.core.patch import Target
from ds_patches.core.state import PatchStatus

if TYPE_CHECKING:
    from ds_patches.core.wrappers import Wrapper

log = logging.getLogger("ds_patches")

_MODULE = "deepspeed.runtime.engine"
_TARGETS = (
    Target(_MODULE, "DeepSpeedEngine.__init__", "ds_patches.core.watch:around_init"),
    Target(_MODULE, "DeepSpeedEngine.step", "ds_patches.core.watch:around_step"),
)
_journal = Journal()
#: By the wrapped function's owner and name, what stood there when it was looked at last.
_seen: dict[tuple[live.Owner, str], Any] = {}
#: The names of all wrapped functions.
_names: set[str] = set()
#: By object and name, what was found in its own `__dict__` in the place of a wrapped method.
_found: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def start(statuses: Iterable[PatchStatus]) -> None:
    """Watch every engine from now on.

    statuses: what has just come of applying patches.
    """
    agreement.prepare(statuses)
    _look_at_classes()
    if not _journal.active and not imports.awaited([_MODULE]):
        imports.add_post_import_hook(_MODULE, _wrap)


def stop() -> None:
    """Watch no longer."""
    imports.remove_post_import_hook(_MODULE, _wrap)
    _journal.remove()


def _wrap() -> None:
    try:
        _journal.install(_TARGETS, lambda target: resolve_name(target.wrapper))
    except AttributeError as error:
        log.warning("engines are not looked at: %s", error)


def around_init(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    agreement.compare(engine)
    _look_at_subclass(engine)
    _look(engine)


def around_step(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    _look(engine)
    return result


def _look(engine: Any) -> None:
    """Find what was replaced since the last look; a few dozen comparisons if nothing was."""
    for (owner, name), value in _seen.items():
        if vars(owner).get(name, live.MISSING) is not value:
            _look_at_classes()
            break
    for thing in (engine, getattr(engine, "optimizer", None)):
        if thing is not None and not _names.isdisjoint(vars(thing)):
            _look_at_own(thing)


def _look_at_classes() -> None:
    _seen.clear()
    _names.clear()
    for patch, wrapper in _wrappers():
        value = live.raw(wrapper.owner, wrapper.name)
        _seen[wrapper.owner, wrapper.name] = value
        _names.add(wrapper.name)
        if not live.leads_to(value, wrapper.installed):
            _tell(patch, wrapper, value)


def _look_at_own(thing: Any) -> None:
    """Look at what an object's own `__dict__` has in the place of wrapped methods."""
    found = _found.setdefault(thing, {})
    for name in vars(thing).keys() & _names:
        value = vars(thing)[name]
        if found.get(name, live.MISSING) is value:
            continue
        found[name] = value
        for patch, wrapper in _wrappers_of(thing):
            if wrapper.name == name and not live.leads_to(value, wrapper.installed):
                _tell(patch, wrapper, value, f"at one {type(thing).__name__}")


def _look_at_subclass(engine: Any) -> None:
    """Look at what a subclass that is not DeepSpeed's own has in the place of wrapped methods."""
    for patch, wrapper in _wrappers_of(engine):
        kinds = type(engine).__mro__
        for kind in kinds[: kinds.index(wrapper.owner)]:
            value = live.raw(kind, wrapper.name)
            is_foreign = value is not live.MISSING and not kind.__module__.startswith("deepspeed.")
            if is_foreign and not live.calls_base(value, wrapper.owner):
                _tell(patch, wrapper, value, f"in {kind.__name__}")


def _tell(patch: str, wrapper: Wrapper, value: Any, where: str = "") -> None:
    """Say it once. What is not to be seen at the class itself is noted for the status."""
    key, by = wrapper.target.key, f"{live.origin(value)} {where}".rstrip()
    noted = lifecycle.lives[patch].replaced
    if not where or key not in noted:
        log.warning("%s: %s is replaced by %s", patch, key, by)
    if where:
        noted.setdefault(key, by)


def _wrappers() -> Iterator[tuple[str, Wrapper]]:
    for name, life in [*lifecycle.lives.items()]:
        yield from ((name, wrapper) for wrapper in life.journal.wrappers if wrapper.on)


def _wrappers_of(thing: Any) -> Iterator[tuple[str, Wrapper]]:
    return ((patch, w) for patch, w in _wrappers() if w.owner in type(thing).__mro__)
