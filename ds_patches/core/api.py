"""The public functions, as `ds_patches` re-exports them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from ds_patches.core import flags, gate, lifecycle, once, registry, watch
from ds_patches.core.errors import AlreadyApplied, PatchNotApplied
from ds_patches.core.flags import Names, Options, Request, Requests
from ds_patches.core.gate import Force
from ds_patches.core.patch import Patch
from ds_patches.core.state import PatchStatus, State, Statuses
from ds_patches.core.values import Value

log = logging.getLogger("ds_patches")
_lock = threading.RLock()
_afterwards: list[Callable[[], None]] = []

#: Not live, and nothing to warn of.
_CONTENT = (State.DISABLED, State.FIXED_UPSTREAM)
#: For questions to which the user's flags are no answer.
_INDIFFERENT = Request(wanted=True, why="", force=Force.NO, options={})


def apply_all(
    *,
    only: Names | None = None,
    skip: Names | None = None,
    strict: bool | None = None,
    force: Names | None = None,
    options: Options | None = None,
) -> Statuses:
    """Apply every patch that is wanted and that the installed DeepSpeed allows.

    The call has the last word: what it leaves out, auto-apply does not apply later either.

    only: names to apply, as a list or separated by commas; all others are left out. skip: names
        to leave out.
    strict: raise if a wanted patch is not live afterwards (default: `DS_PATCHES_STRICT`).
    force: names to apply in spite of the gate; "all" overrides an unknown version only.
    options: `{patch: {option: value}}`; the value may be a list where several choices may, a number
        where the choice is one, and a bool where it is on or off.

    Returns the status of every patch; printed, it is a line for each. A wanted patch that is not
    live is warned of once.

    Raises PatchNotApplied after all were tried: in strict mode for any of them, else only for
    those whose application itself failed (they are rolled back). Raises FlagError on a flag that
    means nothing, UnknownPatch on a name, AlreadyApplied on options that differ from live ones,
    BrokenPatch if the only patch that `only` names is broken.
    """
    with _call():
        patches = registry.patches()
        requests = flags.read(
            patches, only=only, skip=skip, strict=strict, force=force, options=options
        )
        for name, patch in patches.items():
            if not requests.of[name].wanted:
                lifecycle.decline(patch)
        asked_for = [n for n, one in requests.of.items() if one.wanted and not one.for_others]
        if only is not None and len(asked_for) == 1:
            gate.read(patches[asked_for[0]])
        return apply_wanted(patches, requests, options or {})


def apply_wanted(patches: Mapping[str, Patch], requests: Requests, options: Options) -> Statuses:
    """Apply the patches that are wanted and report on them; see `apply_all`."""
    result = Statuses()
    refusals: list[Exception] = []
    for name, patch in patches.items():
        if (request := requests.of[name]).wanted:
            try:
                result[name] = _apply(patch, requests, options.get(name, {}), request.for_others)
                continue
            except AlreadyApplied as error:
                refusals.append(error)
        result[name] = lifecycle.status(patch, request)
    watch.start(result.values())  # also where all is refused: other ranks may have it
    try:
        _raise_first(refusals)
        _report(result, requests)
    except Exception:
        _rest_if_idle()
        raise
    return result


def _apply(
    patch: Patch, requests: Requests, asked: Iterable[str], for_others: bool = False
) -> PatchStatus:
    """Apply a patch after what it requires, or not at all."""
    request = requests.of[patch.name]
    for name in patch.requires:
        required = _apply(registry.patch(name), requests, (), for_others=True)
        if not required.live:
            verdict = gate.check(patch, request.force).without(name, required)
            return lifecycle.status(patch, request, verdict)
    return lifecycle.apply(patch, request, asked, for_others)


def unapply_all() -> Statuses:
    """Take every patch back and return the statuses; the order of applying does not matter.

    What taking one back raises is raised after all were tried.
    """
    result = Statuses()
    errors: list[Exception] = []
    with _call():
        for name in registry.patches():
            try:
                result[name] = unapply(name)
            except Exception as error:
                errors.append(error)
    _raise_first(errors)
    return result


def apply(name: str, *, force: bool = False, **options: Value) -> PatchStatus:
    """Apply one patch now, whatever the environment's lists say.

    force: override an unknown version and a changed shape.
    options: the patch's options by name.

    Raises PatchNotApplied with the reason if it is not live afterwards; nothing of it is left
    then. Raises BrokenPatch, UnknownPatch, FlagError and AlreadyApplied as `apply_all` does.
    """
    with _call():
        patch = registry.patch(name, "apply")
        gate.read(patch)
        forced = (name,) if force else None
        requests = flags.read(
            registry.patches(), only=name, force=forced, options={name: options} if options else {}
        )
        status = _apply(patch, requests, options)
        if not status.live:
            raise PatchNotApplied([status]) from lifecycle.lives[name].failure
        watch.start([status])
        return status


def unapply(name: str) -> PatchStatus:
    """Take one patch back and return its status; harmless if it is not applied.

    Those that require it are taken back before it; after it, what was applied for it alone.
    A wrapper that another library has wrapped over cannot always be removed: it is switched off
    then and passes straight through, and the status says so.
    """
    with _call():
        try:
            patch = registry.patch(name, "unapply")
            for other in _live_users_of(name):
                unapply(other)
            status = lifecycle.unapply(patch, _INDIFFERENT)
            for required in patch.requires:
                if lifecycle.lives[required].for_others and not _live_users_of(required):
                    unapply(required)
            return status
        finally:
            _rest_if_idle()


def _live_users_of(name: str) -> list[str]:
    users = (one.name for one in registry.patches().values() if name in one.requires)
    return [user for user in users if lifecycle.lives[user].journal.active]


def status() -> Statuses:
    """Return the status of every patch, read from the live objects; changes nothing."""
    with _call():
        patches = registry.patches()
        requests = flags.read(patches)
        return Statuses((n, lifecycle.status(p, requests.of[n])) for n, p in patches.items())


def names() -> tuple[str, ...]:
    """Return the names of all patches."""
    return tuple(registry.patches())


def is_applied(name: str) -> bool:
    """Whether every wrapper of the patch is in the call path now.

    True as well when another library has wrapped over ours and still calls it.
    """
    with _call():
        return lifecycle.lives[registry.patch(name, "is_applied").name].live


def after_the_call(action: Callable[[], None]) -> None:
    """Run `action` now, or right after the call that is under way in this or another thread.

    For what an import brings about: that import may be part of a call, and it must not wait for
    another thread's, which may be waiting for the same import.
    """
    _afterwards.append(action)
    _catch_up()


@contextmanager
def _call() -> Iterator[None]:
    """One call at a time."""
    try:
        with _lock, once.call():
            yield
    finally:  # also after a call that was refused: its import may have brought something about
        _catch_up()


def _catch_up() -> None:
    while _afterwards and _lock.acquire(blocking=False):
        try:
            if once.is_under_way() or not _afterwards:
                return
            with once.call():
                _afterwards.pop(0)()
        finally:
            _lock.release()


def _rest_if_idle() -> None:
    """Leave nothing of ours in DeepSpeed where no patch is applied."""
    if not any(life.journal.active for life in [*lifecycle.lives.values()]):
        watch.stop()


def _raise_first(errors: list[Exception]) -> None:
    for later in errors[1:]:
        log.error("%s", later)
    if errors:
        raise errors[0]


def _report(statuses: Mapping[str, PatchStatus], requests: Requests) -> None:
    """Warn once for each patch that is not live, then raise for those that must not be silent."""
    wanted = [name for name, request in requests.of.items() if request.wanted]
    found = [statuses[name] for name in wanted if name in statuses]
    # A release that is too old for one patch has others; if it is for all, nothing was done.
    too_old = [s for s in found if s.state is State.OUT_OF_RANGE]
    content = _CONTENT if len(too_old) == len(wanted) else (*_CONTENT, State.OUT_OF_RANGE)
    missing = [s for s in found if not s.live and s.state not in content]
    for status in missing:
        log.warning("%s is not applied, %s: %s", status.name, status.state.value, status.reason)
    fatal = [s for s in missing if requests.strict or s.state is State.FAILED]
    if fatal:
        causes = (lifecycle.lives[s.name].failure for s in fatal)
        raise PatchNotApplied(fatal) from next(filter(None, causes), None)
