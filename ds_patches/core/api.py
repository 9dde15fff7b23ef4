"""The public functions, as `ds_patches` re-exports them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ds_patches.core import agreement, flags, lifecycle, registry
from ds_patches.core.errors import PatchNotApplied
from ds_patches.core.flags import Names, Options, Value, Wish, Wishes
from ds_patches.core.gate import Force
from ds_patches.core.patch import Patch
from ds_patches.core.state import PatchStatus, State

log = logging.getLogger("ds_patches")
_lock = threading.RLock()
_depth = 0
_afterwards: list[Callable[[], None]] = []

#: Not live, and nothing to warn of.
_CONTENT = (State.DISABLED, State.FIXED_UPSTREAM)
#: For questions to which the user's flags are no answer.
_INDIFFERENT = Wish(wanted=True, why="", force=Force.NO, options={})


def apply_all(
    *,
    only: Names | None = None,
    skip: Names | None = None,
    strict: bool | None = None,
    force: Names | None = None,
    options: Options | None = None,
) -> dict[str, PatchStatus]:
    """Apply every patch that is wanted and that the installed DeepSpeed allows.

    The call has the last word: what it leaves out, auto-apply does not apply later either.

    only: names to apply; all others are left out. skip: names to leave out.
    strict: raise if a wanted patch is not live afterwards (default: `DS_PATCHES_STRICT`).
    force: names to apply in spite of the gate; "all" overrides an unknown version only.
    options: `{patch: {option: value}}`; the value may be a list where several choices may.

    Returns the status of every patch. A wanted patch that is not live is warned of once.
    Raises PatchNotApplied after all were tried: in strict mode for any of them, else only for
    those whose application itself failed (they are rolled back). Raises FlagError on a flag that
    means nothing, UnknownPatch on a name, AlreadyApplied on options that differ from live ones.
    """
    with _call():
        patches = registry.patches()
        wishes = flags.read(
            patches, only=only, skip=skip, strict=strict, force=force, options=options
        )
        for name, patch in patches.items():
            if not wishes.of[name].wanted:
                lifecycle.decline(patch)
        return apply_wanted(patches, wishes, options or {})


def apply_wanted(
    patches: Mapping[str, Patch], wishes: Wishes, options: Options
) -> dict[str, PatchStatus]:
    """Apply the patches that are wanted and report on them; see `apply_all`."""
    result = {}
    for name, patch in patches.items():
        if (wish := wishes.of[name]).wanted:
            result[name] = lifecycle.apply(patch, wish, options.get(name, {}))
        else:
            result[name] = lifecycle.status(patch, wish)
    agreement.watch()  # also where all is refused or disabled: other ranks may have it
    _report([s for s in result.values() if wishes.of[s.name].wanted], wishes.strict)
    return result


def unapply_all() -> dict[str, PatchStatus]:
    """Take every patch back and return the statuses; the order of applying does not matter."""
    return {name: unapply(name) for name in registry.patches()}


def apply(name: str, *, force: bool = False, **options: Value) -> PatchStatus:
    """Apply one patch now, whatever the environment's lists say.

    force: override an unknown version and a changed shape.
    options: the patch's options by name.

    Raises PatchNotApplied with the reason if it is not live afterwards; nothing of it is left
    then. Raises UnknownPatch, FlagError and AlreadyApplied as `apply_all` does.
    """
    with _call():
        patch = registry.patch(name, "apply")
        forced = (name,) if force else None
        wishes = flags.read(
            registry.patches(), only=name, force=forced, options={name: options} if options else {}
        )
        status = lifecycle.apply(patch, wishes.of[name], options)
        agreement.watch()
        if not status.live:
            raise PatchNotApplied([status]) from lifecycle.failure(patch)
        return status


def unapply(name: str) -> PatchStatus:
    """Take one patch back and return its status; harmless if it is not applied.

    A wrapper that another library has wrapped over cannot always be removed: it is switched off
    then and passes straight through, and the status says so.
    """
    with _call():
        status = lifecycle.unapply(registry.patch(name, "unapply"), _INDIFFERENT)
        if not any(lifecycle.is_active(patch) for patch in registry.patches().values()):
            agreement.rest()
        return status


def status() -> dict[str, PatchStatus]:
    """Return the status of every patch, read from the live objects; changes nothing."""
    with _call():
        patches = registry.patches()
        wishes = flags.read(patches)
        return {name: lifecycle.status(p, wishes.of[name]) for name, p in patches.items()}


def names() -> tuple[str, ...]:
    """Return the names of all patches."""
    return tuple(registry.patches())


def is_applied(name: str) -> bool:
    """Whether every wrapper of the patch is in the call path now.

    True as well when another library has wrapped over ours and still calls it.
    """
    with _call():
        return lifecycle.status(registry.patch(name, "is_applied"), _INDIFFERENT).live


def soon(action: Callable[[], None]) -> None:
    """Run `action` now, or right after the call that is under way in this or another thread.

    For what an import brings about: that import may be part of a call, and it must not wait for
    another thread's, which may be waiting for the same import.
    """
    _afterwards.append(action)
    _catch_up()


@contextmanager
def _call() -> Iterator[None]:
    """One call at a time."""
    global _depth
    try:
        with _lock:
            _depth += 1
            try:
                yield
            finally:
                _depth -= 1
    finally:  # also after a call that was refused: its import may have brought something about
        _catch_up()


def _catch_up() -> None:
    global _depth
    while _afterwards and _lock.acquire(blocking=False):
        try:
            if _depth or not _afterwards:
                return
            action = _afterwards.pop(0)
            _depth += 1
            try:
                action()
            finally:
                _depth -= 1
        finally:
            _lock.release()


def _report(wanted: list[PatchStatus], strict: bool) -> None:
    """Warn once for each patch that is not live, then raise for those that must not be silent."""
    missing = [s for s in wanted if not s.live and s.state not in _CONTENT]
    for status in missing:
        log.warning("%s is not applied, %s: %s", status.name, status.state.value, status.reason)
    fatal = [s for s in missing if strict or s.state is State.FAILED]
    if fatal:
        causes = (lifecycle.failure(registry.patch(s.name)) for s in fatal)
        raise PatchNotApplied(fatal) from next(filter(None, causes), None)
