"""The life of a patch in this process: check, apply, unapply, status."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

from packaging.version import Version

from ds_patches.core import gate, imports, release
from ds_patches.core.errors import AlreadyApplied
from ds_patches.core.flags import Wish
from ds_patches.core.gate import Verdict
from ds_patches.core.journal import Journal
from ds_patches.core.patch import Patch, Target
from ds_patches.core.references import resolve
from ds_patches.core.state import PatchStatus, Standing, State

log = logging.getLogger("ds_patches")


@dataclass
class Life:
    """What this process did with one patch. What is live is read from the journal's objects."""

    journal: Journal = field(default_factory=Journal)
    options: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failure: BaseException | None = None
    reverted: bool = False
    #: Modules of which auto-apply waits for the first, beyond DeepSpeed itself.
    waits_for: Sequence[str] = ()


_lives: dict[str, Life] = {}


def apply(patch: Patch, wish: Wish, asked: Iterable[str]) -> PatchStatus:
    """Apply one patch if the gate lets it, wholly or not at all; the outcome is in the status.

    asked: names of the options that the call itself chooses; a live patch that has them otherwise
        raises AlreadyApplied.
    """
    life = _lives.setdefault(patch.name, Life())
    if life.journal.active:
        _must_agree(patch, life, {name: wish.options[name] for name in asked})
        return status(patch, wish)
    life.failure, life.reverted, life.notes = None, False, ()
    verdict = gate.check(patch, wish.force)
    try:
        if verdict.may_apply and (version := _version(verdict)):
            targets = gate.targets(patch, version)
            for module in dict.fromkeys(target.module for target in targets):
                import_module(module)
            # Again, now that the live objects can be seen: somebody may have replaced one.
            verdict = gate.check(patch, wish.force)
            if verdict.may_apply:
                _put_in_place(patch, version, targets, wish, life)
    except Exception as error:
        life.failure = error
        log.debug("%s failed", patch.name, exc_info=error)
    return status(patch, wish, verdict)


def unapply(patch: Patch, wish: Wish) -> PatchStatus:
    """Take one patch back; harmless if it is not applied."""
    life = _lives.get(patch.name)
    if life is not None and life.journal.wrappers:
        was_active = life.journal.active
        life.journal.remove()
        life.reverted = life.reverted or was_active
        life.notes = _deactivate(patch) if was_active else ()
        _warn(patch, (*life.journal.left_behind(), *life.notes))
    decline(patch)
    return status(patch, wish)


def decline(patch: Patch) -> None:
    """Keep a pending patch from being applied by itself."""
    life = _lives.setdefault(patch.name, Life())
    if _awaited(patch) and not life.journal.active:
        life.reverted = True


def status(patch: Patch, wish: Wish, verdict: Verdict | None = None) -> PatchStatus:
    """Return where a patch stands, from the live objects.

    verdict: the gate's answer, where it was asked already.
    """
    life = _lives.get(patch.name, Life())
    standings = life.journal.standings()
    if standings:
        state, reason = _live_state(standings)
    elif life.failure is not None:
        state, reason = State.FAILED, f"{type(life.failure).__name__}: {life.failure}"
    elif life.reverted:
        left = life.journal.left_behind()
        state, reason = State.REVERTED, "; ".join(left) or "unapplied, no wrapper is left"
    elif not wish.wanted:
        state, reason = State.DISABLED, wish.why
    else:
        verdict = verdict or gate.check(patch, wish.force)
        state, reason = verdict.state, verdict.reason
        if verdict.may_apply and (modules := _awaited(patch)):
            state, reason = State.PENDING, f"waits for the import of {' or '.join(modules)}"
    installed = release.installed()
    return PatchStatus(
        name=patch.name,
        state=state,
        reason=reason,
        installed=installed.text if installed else None,
        upstream=patch.upstream,
        notes=life.notes,
        targets={key: standing for key, (standing, _) in standings.items()},
        options=dict(life.options if standings else wish.options),
    )


def wait(patch: Patch, modules: Sequence[str]) -> None:
    """Note that auto-apply waits for the first of `modules` to apply the patch."""
    _lives.setdefault(patch.name, Life()).waits_for = modules


def is_active(patch: Patch) -> bool:
    """Whether any wrapper of the patch is switched on."""
    return _lives.get(patch.name, Life()).journal.active


def is_reverted(patch: Patch) -> bool:
    """Whether the patch was taken back, or refused before it could be applied by itself."""
    return _lives.get(patch.name, Life()).reverted


def failure(patch: Patch) -> BaseException | None:
    """Return what the last attempt to apply the patch raised, if it did."""
    life = _lives.get(patch.name)
    return life.failure if life else None


def _put_in_place(
    patch: Patch, version: Version, targets: tuple[Target, ...], wish: Wish, life: Life
) -> None:
    life.journal.install(targets, lambda target: resolve(target.wrapper))
    try:
        notes = resolve(patch.activate)(version, wish.options) if patch.activate else ()
    except BaseException:
        life.journal.remove()
        _deactivate(patch)
        raise
    life.options = wish.options
    life.notes = (*notes, *life.journal.names_out_of_reach())
    log.debug("%s is applied to DeepSpeed %s", patch.name, version)
    _warn(patch, life.notes)


def _awaited(patch: Patch) -> list[str]:
    """Return the modules that auto-apply waits for to apply this patch."""
    return imports.awaited([release.PACKAGE, *_lives.get(patch.name, Life()).waits_for])


def _deactivate(patch: Patch) -> tuple[str, ...]:
    return tuple(resolve(patch.deactivate)()) if patch.deactivate else ()


def _warn(patch: Patch, notes: tuple[str, ...]) -> None:
    for note in notes:
        log.warning("%s: %s", patch.name, note)


def _must_agree(patch: Patch, life: Life, asked: Mapping[str, str]) -> None:
    for name, value in asked.items():
        if life.options[name] != value:
            raise AlreadyApplied(
                f"{patch.name} is applied with {name}={life.options[name]}; "
                f"unapply it before applying it with {name}={value}"
            )


def _live_state(standings: Mapping[str, tuple[Standing, str]]) -> tuple[State, str]:
    shadows = [
        f"{key} is {standing.value} by {origin}"
        for key, (standing, origin) in standings.items()
        if standing is not Standing.ON_TOP
    ]
    if shadows:
        return State.SHADOWED, "; ".join(shadows)
    return State.APPLIED, f"{len(standings)} of {len(standings)} wrappers in place"


def _version(verdict: Verdict) -> Version | None:
    return verdict.installed.version if verdict.installed else None
