"""The life of a patch in this process: check, apply, unapply, status."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pkgutil import resolve_name

from packaging.version import Version

from ds_patches.core import gate, imports, release
from ds_patches.core.errors import AlreadyApplied
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
    #: Modules of which auto-apply waits for the first, beyond DeepSpeed itself.
    waits_for: Sequence[str] = ()


_lives: dict[str, Life] = {}


def apply(
    patch: Patch, request: Request, asked: Iterable[str], for_others: bool = False
) -> PatchStatus:
    """Apply one patch if the gate lets it, wholly or not at all; the outcome is in the status.

    asked: names of the options that the call itself chooses; a live patch that has them otherwise
        raises AlreadyApplied.
    for_others: it is applied because another one requires it.
    """
    life = _lives.setdefault(patch.name, Life())
    life.for_others = for_others and (life.for_others or not life.journal.active)
    if life.journal.active:
        _must_agree(patch, life, {name: request.options[name] for name in asked})
        return status(patch, request)
    life.failure, life.reverted, life.notes = None, False, ()
    verdict = None
    try:
        verdict = gate.check(patch, request.force)
        if verdict.may_apply and (version := verdict.release):
            targets = gate.targets(patch, version)
            for module in dict.fromkeys(target.module for target in targets):
                import_module(module)
            # Again, now that the live objects can be seen: somebody may have replaced one.
            verdict = gate.check(patch, request.force)
            if verdict.may_apply:
                _put_in_place(patch, version, targets, request, life)
    except Exception as error:
        life.failure = error
        log.debug("%s failed", patch.name, exc_info=error)
    return status(patch, request, verdict)


def blocked(patch: Patch, request: Request, required: PatchStatus) -> PatchStatus:
    """Return the status of a patch that is not applied, as another one is not that it needs."""
    verdict = gate.check(patch, request.force)
    if verdict.may_apply:
        reason = f"needs {required.name}, which is {required.state.value}: {required.reason}"
        verdict = replace(verdict, state=State.BLOCKED, reason=reason)
    return status(patch, request, verdict)


def unapply(patch: Patch, request: Request) -> PatchStatus:
    """Take one patch back; harmless if it is not applied."""
    life = _lives.get(patch.name)
    if life is not None and life.journal.wrappers:
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
    life = _lives.setdefault(patch.name, Life())
    if _awaited(patch) and not life.journal.active:
        life.reverted = True


def status(patch: Patch, request: Request, verdict: Verdict | None = None) -> PatchStatus:
    """Return where a patch stands, from the live objects.

    verdict: the gate's answer, where it was asked already.
    """
    life = _lives.get(patch.name, Life())
    wrapper_states = _wrapper_states(life)
    if wrapper_states:
        state, reason = _live_state(wrapper_states)
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
        targets={key: state for key, (state, _) in wrapper_states.items()},
        options=dict(life.options if wrapper_states else request.options),
    )


def wait(patch: Patch, modules: Sequence[str]) -> None:
    """Note that auto-apply waits for the first of `modules` to apply the patch."""
    _lives.setdefault(patch.name, Life()).waits_for = modules


def is_active(patch: Patch) -> bool:
    """Whether any wrapper of the patch is switched on."""
    return _lives.get(patch.name, Life()).journal.active


def is_for_others(name: str) -> bool:
    """Whether a patch is applied only because others require it."""
    return _lives.get(name, Life()).for_others


def live_options(patch: Patch) -> Mapping[str, str] | None:
    """Return what the patch is applied with, if every wrapper of it is in the call path."""
    life = _lives.get(patch.name, Life())
    wrappers = [state for state, _ in _wrapper_states(life).values()]
    return life.options if all_reached(wrappers) else None


def journals() -> Iterator[tuple[str, Journal]]:
    """Yield the journal of every patch that was applied in this process."""
    return ((name, life.journal) for name, life in _lives.items())


def note_replaced(name: str, key: str, by: str) -> bool:
    """Note that a wrapped function is replaced at some engine; return whether that is new."""
    is_new = key not in _lives[name].replaced
    _lives[name].replaced.setdefault(key, by)
    return is_new


def is_reverted(patch: Patch) -> bool:
    """Whether the patch was taken back, or refused before it could be applied by itself."""
    return _lives.get(patch.name, Life()).reverted


def failure(patch: Patch) -> BaseException | None:
    """Return what the last attempt to apply the patch raised, if it did."""
    life = _lives.get(patch.name)
    return life.failure if life else None


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


def _awaited(patch: Patch) -> list[str]:
    """Return the modules that auto-apply waits for to apply this patch."""
    return imports.awaited([release.PACKAGE, *_lives.get(patch.name, Life()).waits_for])


def _deactivate(patch: Patch) -> tuple[str, ...]:
    return tuple(resolve_name(patch.deactivate)()) if patch.deactivate else ()


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


def _wrapper_states(life: Life) -> dict[str, tuple[WrapperState, str]]:
    found = life.journal.wrapper_states()
    replaced = {key: (WrapperState.REPLACED, by) for key, by in life.replaced.items()}
    return {key: replaced.get(key, found[key]) for key in found}


def _live_state(wrapper_states: Mapping[str, tuple[WrapperState, str]]) -> tuple[State, str]:
    shadows = [
        f"{key} is {state.value} by {origin}"
        for key, (state, origin) in wrapper_states.items()
        if state is not WrapperState.ON_TOP
    ]
    if shadows:
        return State.SHADOWED, "; ".join(shadows)
    return State.APPLIED, f"{len(wrapper_states)} of {len(wrapper_states)} wrappers in place"
