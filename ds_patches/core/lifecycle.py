"""The life of a patch in this process: check, apply, unapply, status."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import resolve_name

from packaging.version import Version

from ds_patches.core import gate, imports, release
from ds_patches.core.errors import AlreadyApplied, BrokenPatch
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
    options: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failure: BaseException | None = None
    reverted: bool = False
    #: Applied as others require it, and not for itself.
    for_others: bool = False
    #: Of wrapped functions that are replaced at an engine or in its class: by whom, and where.
    replaced: dict[str, str] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """Whether every wrapper is in the call path."""
        return all_reached([state for state, _ in self.wrapper_states().values()])

    def wrapper_states(self) -> dict[str, tuple[WrapperState, str]]:
        """Return where each wrapper stands, and what lies over it, by the key of its target."""
        found = self.journal.wrapper_states()
        replaced = {key: (WrapperState.REPLACED, by) for key, by in self.replaced.items()}
        return {key: replaced.get(key, found[key]) for key in found}


#: By the names of patches.
lives: defaultdict[str, Life] = defaultdict(Life)


def apply(
    patch: Patch, request: Request, asked: Iterable[str], for_others: bool = False
) -> PatchStatus:
    """Apply one patch if the gate lets it, wholly or not at all; the outcome is in the status.

    asked: names of the options that the call itself chooses; a live patch that has them otherwise
        raises AlreadyApplied.
    for_others: it is applied because another one requires it.
    """
    life = lives[patch.name]
    life.for_others = for_others and (life.for_others or not life.journal.active)
    if life.journal.active:
        for name in asked:
            if life.options[name] != (value := request.options[name]):
                raise AlreadyApplied(
                    f"{patch.name} is applied with {name}={life.options[name]}; "
                    f"unapply it before applying it with {name}={value}"
                )
        return status(patch, request)
    life.failure, life.reverted, life.notes = None, False, ()
    verdict = None
    try:
        verdict = gate.check(patch, request.force)
        if verdict.may_apply and (version := verdict.release):
            targets = gate.targets(patch, version)
            # DeepSpeed first: if its import has failed before, parts of it are imported still.
            for module in dict.fromkeys([release.PACKAGE, *(t.module for t in targets)]):
                with gate.importing(module):
                    import_module(module)
            # Again, now that the live objects can be seen: somebody may have replaced one.
            verdict = gate.check(patch, request.force)
            if verdict.may_apply:
                _put_in_place(patch, version, targets, request, life)
    except Exception as error:
        life.failure = error
        log.debug("%s failed", patch.name, exc_info=error)
    return status(patch, request, verdict)


def unapply(patch: Patch, request: Request) -> PatchStatus:
    """Take one patch back; harmless if it is not applied."""
    life = lives[patch.name]
    if life.journal.wrappers:
        was_active = life.journal.active
        life.journal.remove()
        life.reverted = life.reverted or was_active
        life.replaced.clear()
        life.notes = _deactivate(patch) if was_active else ()
        _warn(patch, (*life.journal.left_behind(), *life.notes))
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
    elif isinstance(life.failure, BrokenPatch):
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
        options=dict(life.options if wrapper_states else request.options),
    )


def note(name: str, text: str) -> None:
    """Have the status of a live patch say this, too."""
    life = lives[name]
    if text not in life.notes:
        life.notes += (text,)


def _put_in_place(
    patch: Patch, version: Version, targets: tuple[Target, ...], request: Request, life: Life
) -> None:
    life.journal.install(targets, lambda target: resolve_name(target.wrapper))
    try:
        notes = resolve_name(patch.activate)(version, request.options) if patch.activate else ()
    except BaseException:
        life.journal.remove()
        _deactivate(patch)
        raise
    life.options = request.options
    life.notes = (*notes, *life.journal.names_out_of_reach())
    log.debug("%s is applied to DeepSpeed %s", patch.name, version)
    _warn(patch, life.notes)


def _deactivate(patch: Patch) -> tuple[str, ...]:
    return tuple(resolve_name(patch.deactivate)()) if patch.deactivate else ()


def _warn(patch: Patch, notes: tuple[str, ...]) -> None:
    for note in notes:
        log.warning("%s: %s", patch.name, note)
