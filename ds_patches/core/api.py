"""The public functions, as `ds_patches` re-exports them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ds_patches.core import flags, gate, lifecycle, log, once, registry, watch
from ds_patches.core.errors import PatchNotApplied
from ds_patches.core.flags import Names, Request, Requests
from ds_patches.core.gate import Force
from ds_patches.core.patch import Patch
from ds_patches.core.state import PatchStatus, State, Statuses

_lock = threading.RLock()
_afterwards: list[Callable[[], None]] = []

#: To take a patch back, whatever the user's flags say of it.
_WHATEVER = Request(wanted=True, why="", force=Force.NO)


def apply_all(
    *,
    only: Names | None = None,
    skip: Names | None = None,
    strict: bool | None = None,
    force: Names | None = None,
) -> Statuses:
    """Apply every patch that is wanted and that the installed DeepSpeed allows.

    The call has the last word: what it leaves out, auto-apply does not apply later either.

    only: names to apply, as a list or separated by commas; all others are left out. skip: names
        to leave out.
    strict: raise if a wanted patch is not live afterwards (default: `DS_PATCHES_STRICT`).
    force: names to apply in spite of the gate; "all" overrides an unknown version only.

    Returns the status of every patch; printed, it is a line for each. A wanted patch that is not
    live is warned of once.

    Raises PatchNotApplied after all were tried: in strict mode for any of them, else only for
    those whose application itself failed (they are rolled back). Raises FlagError on a flag that
    means nothing, UnknownPatch on a name.
    """
    with _call():
        patches = registry.patches()
        requests = flags.read(patches, only=only, skip=skip, strict=strict, force=force)
        log.say(requests.level)
        for name, patch in patches.items():
            if not requests.of[name].wanted:
                lifecycle.decline(patch)
        return apply_wanted(patches, requests)


def apply_wanted(patches: Mapping[str, Patch], requests: Requests) -> Statuses:
    """Apply the patches that are wanted and report on them; see `apply_all`."""
    result = Statuses()
    for name, patch in patches.items():
        if (request := requests.of[name]).wanted:
            result[name] = _apply(patch, requests, request.for_others)
        else:
            result[name] = lifecycle.status(patch, request)
    watch.start(result.values(), requests)  # also where all is refused: other ranks may have it
    try:
        _report(result, requests)
    except Exception:
        _rest_if_idle()
        raise
    return result


def _apply(patch: Patch, requests: Requests, for_others: bool = False) -> PatchStatus:
    """Apply a patch after what it requires, or not at all."""
    request = requests.of[patch.name]
    for name in patch.requires:
        required = _apply(registry.patch(name), requests, for_others=True)
        if not required.live:
            verdict = gate.check(patch, request.force).without(name, required)
            return lifecycle.refuse(patch, request, verdict)
    return lifecycle.apply(patch, request, for_others)


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
    for later in errors[1:]:
        log.ours.error("%s", later)
    if errors:
        raise errors[0]
    return result


def apply(name: str, *, force: bool = False) -> PatchStatus:
    """Apply one patch now, whatever the environment's lists say.

    force: override an unknown version and a changed shape.

    Raises PatchNotApplied with the reason if it is not live afterwards; nothing of it is left
    then. Raises UnknownPatch and FlagError as `apply_all` does.
    """
    with _call():
        patch = registry.patch(name, "apply")
        forced = (name,) if force else None
        requests = flags.read(registry.patches(), only=name, force=forced)
        log.say(requests.level)
        status = _apply(patch, requests)
        if not status.live:
            raise PatchNotApplied([status]) from lifecycle.lives[name].failure
        watch.start([status], requests)
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
            status = lifecycle.unapply(patch, _WHATEVER)
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


def _report(statuses: Mapping[str, PatchStatus], requests: Requests) -> None:
    """Warn once of what is not live, for each state, then raise for what must not be silent."""
    wanted = [name for name, request in requests.of.items() if request.wanted]
    found = [statuses[name] for name in wanted if name in statuses]
    missing = [s for s in found if not s.live and s.state is not State.DISABLED]
    fitting = [s for s in missing if s.state is not State.OUT_OF_RANGE]
    # A release that is too old for one patch has others; if it is for all, nothing was done.
    if len(missing) - len(fitting) < len(wanted):
        missing = fitting
    for state in dict.fromkeys(status.state for status in missing):
        alike = [status for status in missing if status.state is state]
        names, are = ", ".join(s.name for s in alike), "are" if alike[1:] else "is"
        reason = alike[0].reason.replace(f"={alike[0].name}", f"={names.replace(' ', '')}")
        log.ours.log(
            log.for_the_job(), "%s %s not applied, %s: %s", names, are, state.value, reason
        )
    fatal = [s for s in missing if requests.strict or s.state is State.FAILED]
    if fatal:
        causes = (lifecycle.lives[s.name].failure for s in fatal)
        raise PatchNotApplied(fatal) from next(filter(None, causes), None)
