"""The public functions, as `ds_patches` re-exports them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from ds_patches.core import agreement, flags, log, once, registry
from ds_patches.core.errors import PatchNotApplied
from ds_patches.core.flags import Names, Request, Requests
from ds_patches.core.lifecycle import lives
from ds_patches.core.state import PatchStatus, State, Statuses

_lock = threading.RLock()
_afterwards: list[Callable[[], None]] = []

#: To take a patch back, whatever the flags say of it.
_WHATEVER = Request(wanted=True, why="", force=False)


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
    force: names to apply in spite of the gate.

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
        wanted = [name for name, request in requests.of.items() if request.wanted]
        for name in patches.keys() - {*wanted}:
            lives[name].decline()
        return apply_wanted(requests, wanted)


def apply_wanted(requests: Requests, due: Iterable[str]) -> Statuses:
    """Apply these patches, report on them, and return the status of every patch."""
    applied = {name: lives[name].apply(requests) for name in due}
    agreement.start(requests)  # also where all is refused: other ranks may have it
    try:
        _report([*applied.values()], strict=requests.strict)
    except Exception:
        _rest_if_idle()
        raise
    others = requests.of.items()
    return Statuses((name, applied.get(name) or lives[name].status(one)) for name, one in others)


def unapply_all() -> Statuses:
    """Take every patch back and return the statuses; the order of applying does not matter.

    What taking one back raises is raised after all were tried.
    """
    with _call():
        with ExitStack() as each:
            for name in registry.patches():
                each.callback(unapply, name)
        return Statuses((name, lives[name].status(_WHATEVER)) for name in registry.patches())


def apply(name: str, *, force: bool = False) -> PatchStatus:
    """Apply one patch now, whatever the environment's lists say.

    force: override an unknown version and a changed shape.

    Raises PatchNotApplied with the reason if it is not live afterwards; nothing of it is left
    then. Raises UnknownPatch and FlagError as `apply_all` does.
    """
    with _call():
        registry.patch(name, "apply")
        requests = flags.read(registry.patches(), only=name, force=name if force else None)
        log.say(requests.level)
        status = lives[name].apply(requests)
        if not status.live:
            raise PatchNotApplied([status]) from lives[name].failure
        agreement.start(requests)
        return status


def unapply(name: str) -> PatchStatus:
    """Take one patch back and return its status; harmless if it is not applied.

    Those that require it are taken back before it; after it, what was applied for it alone.
    A wrapper that another library has wrapped over cannot always be removed: it is switched off
    then and passes straight through, and the status says so.
    """
    with _call():
        life = lives[registry.patch(name, "unapply").name]
        try:
            life.unapply()
        finally:
            _rest_if_idle()
        return life.status(_WHATEVER)


def status() -> Statuses:
    """Return the status of every patch, read from the live objects; changes nothing."""
    with _call():
        requests = flags.read(registry.patches())
        return Statuses((name, lives[name].status(one)) for name, one in requests.of.items())


def names() -> tuple[str, ...]:
    """Return the names of all patches."""
    return tuple(registry.patches())


def is_applied(name: str) -> bool:
    """Whether every wrapper of the patch is in the call path now.

    True as well when another library has wrapped over ours and still calls it.
    """
    with _call():
        return lives[registry.patch(name, "is_applied").name].live


def of(package: str) -> tuple[partial[PatchStatus], partial[PatchStatus], partial[bool]]:
    """Return `apply`, `unapply` and `is_applied` of the patch that this package or file is."""
    name = package.rpartition(".")[2]
    return partial(apply, name), partial(unapply, name), partial(is_applied, name)


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
    if not any(life.journal.active for life in lives.values()):
        agreement.stop()


def _report(statuses: Sequence[PatchStatus], *, strict: bool) -> None:
    """Warn once of what is not live, for each state, then raise for what must not be silent."""
    missing = [status for status in statuses if not status.live]
    fitting = [status for status in missing if status.state is not State.OUT_OF_RANGE]
    # A release that is too old for one patch has others; if it is for all, nothing was done.
    if len(missing) - len(fitting) < len(statuses):
        missing = fitting
    for state in dict.fromkeys(status.state for status in missing):
        alike = [status for status in missing if status.state is state]
        names, are = ", ".join(s.name for s in alike), "are" if alike[1:] else "is"
        reason = alike[0].reason.replace(f"={alike[0].name}", f"={names.replace(' ', '')}")
        log.ours.log(
            log.for_the_job(), "%s %s not applied, %s: %s", names, are, state.value, reason
        )
    fatal = [status for status in missing if strict or status.state is State.FAILED]
    if fatal:
        causes = (lives[status.name].failure for status in fatal)
        raise PatchNotApplied(fatal) from next(filter(None, causes), None)
