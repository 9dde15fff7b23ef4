"""The life of a patch in this process: check, apply, unapply, status."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module

from ds_patches.core import gate, imports, registry, release
from ds_patches.core.errors import ImportFails, Misused
from ds_patches.core.flags import Request, Requests
from ds_patches.core.gate import Verdict
from ds_patches.core.journal import Journal, States
from ds_patches.core.patch import Patch, Target
from ds_patches.core.state import PatchStatus, State, WrapperState, all_reached

log = logging.getLogger("ds_patches")


@dataclass
class Life:
    """What this process did with one patch. What is live is read from the journal's objects.

    for_others: applied as others require it, and not for itself.
    """

    patch: Patch
    journal: Journal = field(default_factory=Journal)
    notes: tuple[str, ...] = ()
    failure: BaseException | None = None
    reverted: bool = False
    for_others: bool = False

    def apply(self, requests: Requests) -> PatchStatus:
        """Apply the patch and what it requires, if the gate lets it, wholly or not at all."""
        request, verdict = requests.of[self.patch.name], None
        active = self.journal.active
        self.for_others = request.for_others and (self.for_others or not active)
        if not active:
            self.failure, self.reverted, self.notes = None, False, ()
        if not self.journal.is_in_place:
            try:
                verdict = self._try_to_apply(requests)
            except Exception as error:
                self.failure = error
                log.debug("%s failed", self.patch.name, exc_info=error)
        return self.status(request, verdict)

    def unapply(self) -> None:
        """Take the patch back, after those that require it, and before what was applied for it."""
        for user in self._live_users():
            user.unapply()
        try:
            if self.journal.active:
                self.reverted, self.notes = True, ()
                self._deactivate()
        except Misused:  # not now: nothing was taken back
            self.reverted = False
            raise
        except BaseException:
            self.journal.remove()
            raise
        self.journal.remove()
        self._warn(self.journal.left_behind())
        self.decline()
        for required in map(lives.__getitem__, self.patch.requires):
            if required.for_others and not required._live_users():
                required.unapply()

    def decline(self) -> None:
        """Keep a pending patch from being applied by itself."""
        if imports.awaited([release.PACKAGE]) and not self.journal.active:
            self.reverted = True

    @property
    def live(self) -> bool:
        """Whether every wrapper is in the call path."""
        return all_reached([state for state, _ in self.journal.states().values()])

    def status(self, request: Request, verdict: Verdict | None = None) -> PatchStatus:
        """Return where the patch stands, from the live objects; the gate is asked if it was not."""
        states = self.journal.states()
        state, reason = self._state(states, request, verdict)
        installed = release.installed()
        return PatchStatus(
            name=self.patch.name,
            state=state,
            reason=reason,
            installed=installed.text if installed else None,
            upstream=self.patch.upstream,
            notes=self.notes,
            targets={key: where for key, (where, _) in states.items()},
        )

    def _state(
        self, states: States, request: Request, verdict: Verdict | None
    ) -> tuple[State, str]:
        shadows = [
            f"{key} is {where.value} by {origin}"
            for key, (where, origin) in states.items()
            if where is not WrapperState.ON_TOP
        ]
        if shadows:
            return State.SHADOWED, "; ".join(shadows)
        if count := len(states):
            return State.APPLIED, f"{count} of {count} wrappers in place"
        if isinstance(self.failure, ImportFails):
            return State.BROKEN, str(self.failure)
        if self.failure is not None:
            return State.FAILED, f"{type(self.failure).__name__}: {self.failure}"
        if self.reverted:
            left = self.journal.left_behind()
            return State.REVERTED, "; ".join(left) or "unapplied, no wrapper is left"
        if not request.wanted:
            return State.DISABLED, request.why
        verdict = verdict or gate.check(self.patch, request.force)
        if verdict.may_apply and imports.awaited([release.PACKAGE]):
            return State.PENDING, f"would apply at the import of {release.PACKAGE}"
        return verdict.state, verdict.reason

    def _try_to_apply(self, requests: Requests) -> Verdict:
        force = requests.of[self.patch.name].force
        verdict = gate.check(self.patch, force)
        for name in self.patch.requires if verdict.may_apply else ():
            required = lives[name].apply(requests)
            if not required.live:
                return verdict.without(name, required)
        if verdict.may_apply and (version := verdict.release):
            targets = gate.targets(self.patch, version)
            # DeepSpeed first: if its import has failed before, parts of it are imported still.
            for module in dict.fromkeys([release.PACKAGE, *(t.module for t in targets)]):
                with gate.importing(module):
                    import_module(module)
            verdict = gate.check(self.patch, force)
            if verdict.may_apply:
                self._put_in_place(targets)
        return verdict

    def _put_in_place(self, targets: tuple[Target, ...]) -> None:
        patch, is_active = self.patch, self.journal.active
        self.journal.install(targets, lambda target: patch.hook(target.wrapper))
        try:
            notes = patch.hook(patch.activate)() if patch.activate and not is_active else ()
        except BaseException:
            self.journal.remove()
            self._deactivate()
            raise
        self.notes = (*notes, *self.journal.names_out_of_reach())
        log.debug("%s is applied to DeepSpeed %s", patch.name, release.told())
        self._warn(self.notes)

    def _deactivate(self) -> None:
        if self.patch.deactivate:
            self.patch.hook(self.patch.deactivate)()

    def _warn(self, notes: Iterable[str]) -> None:
        for note in notes:
            log.warning("%s: %s", self.patch.name, note)

    def _live_users(self) -> list[Life]:
        """Return the lives of those that require this patch and are applied."""
        names = (one.name for one in registry.patches().values() if self.patch.name in one.requires)
        return [lives[name] for name in names if lives[name].journal.active]


class _Lives(dict[str, Life]):
    def __missing__(self, name: str) -> Life:
        return self.setdefault(name, Life(registry.patch(name)))


#: By the names of patches.
lives = _Lives()


def note(name: str, text: str) -> None:
    """Have the status of a live patch say this, too."""
    life = lives[name]
    if text not in life.notes:
        life.notes += (text,)
