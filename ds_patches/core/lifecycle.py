"""The life of a patch in this process: check, apply, unapply, status."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module

from packaging.version import Version

from ds_patches.core import engines, gate, imports, release
from ds_patches.core.errors import ImportFails
from ds_patches.core.flags import Request
from ds_patches.core.gate import Verdict
from ds_patches.core.journal import Journal
from ds_patches.core.patch import Patch, Target
from ds_patches.core.state import PatchStatus, State, WrapperState, all_reached

log = logging.getLogger("ds_patches")


@dataclass
class Life:
    """What this process did with one patch. What is live is read from the journal's objects."""

    journal: Journal = field(default_factory=Journal)
    notes: tuple[str, ...] = ()
    failure: BaseException | None = None
    reverted: bool = False
    #: Applied as others require it, and not for itself.
    for_others: bool = False

    def begin_anew(self) -> None:
        """Forget how it ended before."""
        self.failure, self.reverted, self.notes = None, False, ()

    @property
    def live(self) -> bool:
        """Whether every wrapper is in the call path."""
        return all_reached([state for state, _ in self.wrapper_states().values()])

    def wrapper_states(self) -> dict[str, tuple[WrapperState, str]]:
        """Return where each wrapper stands, and what lies over it, by the key of its target."""
        found = self.journal.wrapper_states()
        for wrapper in self.journal.wrappers if engines.known else ():
            if wrapper.on and (by := engines.replacement(wrapper)):
                found[wrapper.target.key] = (WrapperState.REPLACED, by)
        return found


#: By the names of patches.
lives: defaultdict[str, Life] = defaultdict(Life)


def apply(patch: Patch, request: Request, for_others: bool = False) -> PatchStatus:
    """Apply one patch if the gate lets it, wholly or not at all; the outcome is in the status.

    for_others: it is applied because another one requires it.
    """
    life = lives[patch.name]
    life.for_others = for_others and (life.for_others or not life.journal.active)
    if life.journal.active:
        return status(patch, request)
    life.begin_anew()
    verdict = None
    try:
        verdict = gate.check(patch, request.force)
        if verdict.may_apply and (version := verdict.release):
            targets = gate.targets(patch, version)
            # DeepSpeed first: if its import has failed before, parts of it are imported still.
            for module in dict.fromkeys([release.PACKAGE, *(t.module for t in targets)]):
                with gate.importing(module):
                    import_module(module)
            verdict = gate.check_live(patch, verdict, request.force)
            if verdict.may_apply:
                _put_in_place(patch, version, targets, life)
    except Exception as error:
        life.failure = error
        log.debug("%s failed", patch.name, exc_info=error)
    return status(patch, request, verdict)


def refuse(patch: Patch, request: Request, verdict: Verdict) -> PatchStatus:
    """Return the status of a patch that is asked for, and may not be applied."""
    lives[patch.name].begin_anew()
    return status(patch, request, verdict)


def unapply(patch: Patch, request: Request) -> PatchStatus:
    """Take one patch back; harmless if it is not applied."""
    life = lives[patch.name]
    if life.journal.wrappers:
        was_active = life.journal.active
        life.journal.remove()
        life.reverted = life.reverted or was_active
        life.notes = ()
        if was_active:
            _deactivate(patch)
        _warn(patch, life.journal.left_behind())
    decline(patch)
    return status(patch, request)


def decline(patch: Patch) -> None:
    """Keep a pending patch from being applied by itself."""
    life = lives[patch.name]
    if imports.awaited([release.PACKAGE]) and not life.journal.active:
        life.reverted = True


def status(patch: Patch, request: Request, verdict: Verdict | None = None) -> PatchStatus:
    """Return where a patch stands, from the live objects.

    verdict: the gate's answer, where it was asked already.
    """
    life = lives[patch.name]
    wrapper_states = life.wrapper_states()
    shadows = [
        f"{key} is {where.value} by {origin}"
        for key, (where, origin) in wrapper_states.items()
        if where is not WrapperState.ON_TOP
    ]
    if shadows:
        state, reason = State.SHADOWED, "; ".join(shadows)
    elif count := len(wrapper_states):
        state, reason = State.APPLIED, f"{count} of {count} wrappers in place"
    elif isinstance(life.failure, ImportFails):
        state, reason = State.BROKEN, str(life.failure)
    elif life.failure is not None:
        state, reason = State.FAILED, f"{type(life.failure).__name__}: {life.failure}"
    elif life.reverted:
        left = life.journal.left_behind()
        state, reason = State.REVERTED, "; ".join(left) or "unapplied, no wrapper is left"
    elif not request.wanted:
        state, reason = State.DISABLED, request.why
    else:
        verdict = verdict or gate.check(patch, request.force)
        state, reason = verdict.state, verdict.reason
        if verdict.may_apply and imports.awaited([release.PACKAGE]):
            state, reason = State.PENDING, f"would apply at the import of {release.PACKAGE}"
    installed = release.installed()
    return PatchStatus(
        name=patch.name,
        state=state,
        reason=reason,
        installed=installed.text if installed else None,
        upstream=patch.upstream,
        notes=life.notes,
        targets={key: state for key, (state, _) in wrapper_states.items()},
    )


def note(name: str, text: str) -> None:
    """Have the status of a live patch say this, too."""
    life = lives[name]
    if text not in life.notes:
        life.notes += (text,)


def _put_in_place(patch: Patch, version: Version, targets: tuple[Target, ...], life: Life) -> None:
    life.journal.install(targets, lambda target: patch.hook(target.wrapper))
    try:
        notes = patch.hook(patch.activate)() if patch.activate else ()
    except BaseException:
        life.journal.remove()
        _deactivate(patch)
        raise
    life.notes = (*notes, *life.journal.names_out_of_reach())
    log.debug("%s is applied to DeepSpeed %s", patch.name, version)
    _warn(patch, life.notes)


def _deactivate(patch: Patch) -> None:
    if patch.deactivate:
        patch.hook(patch.deactivate)()


def _warn(patch: Patch, notes: Iterable[str]) -> None:
    for note in notes:
        log.warning("%s: %s", patch.name, note)
