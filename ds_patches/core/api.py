"""The public functions, which `ds_patches` re-exports."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from ds_patches.core import agreement, flags, gate, lifecycle, log, registry, release
from ds_patches.core.errors import ImportFails, PatchNotApplied
from ds_patches.core.flags import Names, Request, Requests
from ds_patches.core.lifecycle import lifecycles
from ds_patches.core.state import PatchStatus, State, Statuses

#: Held by one call at a time, and not while DeepSpeed is imported: another thread may be importing
#: it, and applies patches at the end of the import.
_lock = threading.RLock()

#: The request to read the status of a patch that was taken back, whatever the flags are.
_WANTED = Request(wanted=True, why="", force=False)


def apply_all(
    *,
    only: Names | None = None,
    skip: Names | None = None,
    strict: bool | None = None,
    force: Names | None = None,
) -> Statuses:
    """Apply every wanted patch that supports the installed DeepSpeed.

    The arguments override the environment: a patch that this call leaves out is not applied by the
    start-up hook later either.

    only: names of the patches to apply, as a list or separated by commas; all others are left out.
    skip: names of patches to leave out.
    strict: raise if a wanted patch is not live afterwards (default: `DS_PATCHES_STRICT`).
    force: names of patches to apply although the gate refuses them.

    Returns the status of every patch; printed, it has a line for each. Warns once about wanted
    patches that are not live.

    Raises PatchNotApplied after all were tried: in strict mode for any of them, else only for
    those whose application raised (these are rolled back). Raises FlagError for an unknown flag or
    value, UnknownPatch for an unknown name.
    """
    patches = registry.patches()
    requests = flags.read(patches, only=only, skip=skip, strict=strict, force=force)
    log.set_up(requests.level)
    for name, request in requests.by_name.items():
        if not request.wanted and not lifecycles[name].was_applied:
            lifecycles[name].declined = True
    return apply_and_report(requests, requests.wanted)


def apply_and_report(requests: Requests, names: Sequence[str]) -> Statuses:
    """Apply these patches, warn or raise if one is not live, and return all statuses."""
    applied = _apply(requests, names)
    _report([*applied.values()], strict=requests.strict)
    left_out = {name: request for name, request in requests.by_name.items() if name not in applied}
    statuses = applied | (_statuses(left_out) if left_out else {})
    return Statuses((name, statuses[name]) for name in requests.by_name)


def unapply_all() -> Statuses:
    """Take every patch back, in whatever order they were applied, and return the statuses.

    If taking one back raises, the exception is raised after all were tried.
    """
    with _one_call():
        lifecycle.take_back(registry.patches())
    return _statuses(dict.fromkeys(registry.patches(), _WANTED))


def apply(name: str, *, force: bool = False) -> PatchStatus:
    """Apply one patch now, whatever `DS_PATCHES` and `DS_PATCHES_SKIP` say.

    force: apply it also to a release that is too new, or to unknown code.

    Raises PatchNotApplied, with the reason, if the patch is not live afterwards; it is then rolled
    back. Raises UnknownPatch and FlagError as `apply_all` does.
    """
    registry.patch(name, "apply")
    requests = flags.read(registry.patches(), only=name, force=name if force else None)
    log.set_up(requests.level)
    status = _apply(requests, [name])[name]
    if not status.live:
        raise PatchNotApplied([status]) from lifecycles[name].failure
    return status


def unapply(name: str) -> PatchStatus:
    """Take one patch back and return its status; does nothing if it is not applied.

    Patches that require it are taken back first. A wrapper that another library has wrapped cannot
    always be removed: then it is switched off, and calls pass straight through it.
    """
    with _one_call():
        lifecycle.take_back([registry.patch(name, "unapply").name])
    return _statuses({name: _WANTED})[name]


def status() -> Statuses:
    """Return the status of every patch, read from the live objects; changes nothing."""
    return _statuses(flags.read(registry.patches()).by_name)


def names() -> tuple[str, ...]:
    """Return the names of all patches."""
    return tuple(registry.patches())


def is_applied(name: str) -> bool:
    """Return True if every call of a wrapped function passes the patch's wrapper now.

    Another library's wrapper may lie over it, if that was made with functools.wraps or wrapt.
    """
    with _one_call():
        return lifecycles[registry.patch(name, "is_applied").name].journal.is_in_place


def of(package: str) -> tuple[partial[PatchStatus], partial[PatchStatus], partial[bool]]:
    """Return the functions `apply`, `unapply` and `is_applied` for the patch in this module."""
    name = package.rpartition(".")[2]
    return partial(apply, name), partial(unapply, name), partial(is_applied, name)


def _apply(requests: Requests, names: Sequence[str]) -> dict[str, PatchStatus]:
    """Import DeepSpeed and apply these patches; return their statuses."""
    failure, installed = None, release.installed() if names else None
    if installed is not None:
        try:
            gate.load(release.PACKAGE)
        except ImportFails as error:
            failure = error
    with _one_call():
        if installed is not None and failure is None:
            agreement.start()
        return {name: lifecycles[name].apply(requests, installed, failure) for name in names}


def _statuses(requests: Mapping[str, Request]) -> Statuses:
    installed = release.installed()
    with _one_call():
        return Statuses((n, lifecycles[n].status(req, installed)) for n, req in requests.items())


@contextmanager
def _one_call() -> Iterator[None]:
    """Hold the lock; if no patch is applied at the end, unwrap the engines' constructor as well."""
    with _lock:
        try:
            yield
        finally:
            if not any(patch.was_applied for patch in lifecycles.values()):
                agreement.stop()


def _report(statuses: Sequence[PatchStatus], *, strict: bool) -> None:
    """Log a warning for each reason why patches are not live; raise if strict, or if one failed."""
    missing = [status for status in statuses if not status.live]
    in_range = [status for status in missing if status.state is not State.OUT_OF_RANGE]
    # That a patch is out of range is worth a warning only if all patches are.
    if len(missing) - len(in_range) < len(statuses):
        missing = in_range
    groups: dict[tuple[State, str], list[str]] = {}
    for status in missing:
        reason = status.reason.replace(f"={status.name}", "={names}")
        groups.setdefault((status.state, reason), []).append(status.name)
    for (state, reason), names in groups.items():
        are, text = "are" if names[1:] else "is", reason.replace("={names}", f"={','.join(names)}")
        message = f"{', '.join(names)} {are} not applied, {state.value}: {text}"
        log.logger.log(log.level_for_the_job(), "%s", message)
    fatal = [s for s in missing if strict or (s.state is State.FAILED and not s.targets)]
    if fatal:
        causes = (lifecycles[status.name].failure for status in fatal)
        raise PatchNotApplied(fatal) from next(filter(None, causes), None)
