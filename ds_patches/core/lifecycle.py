"""The lifecycle of a patch in this process: check, apply, take back, status."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

from ds_patches.core import gate, registry, shape
from ds_patches.core.errors import ImportFails
from ds_patches.core.flags import Request, Requests
from ds_patches.core.gate import Verdict
from ds_patches.core.journal import Journal, States
from ds_patches.core.log import logger
from ds_patches.core.patch import Patch
from ds_patches.core.release import Release
from ds_patches.core.state import PatchStatus, State, WrapperState


@dataclass
class Lifecycle:
    """The state of one patch in this process; whether it is live is read from the live objects.

    failure: the exception of the last attempt to apply it, or None.
    declined: a call left the patch out or took it back, and none has applied it since; the start-up
        hook does not apply it then.
    reason: why it was not live after the last call that applied patches; "" if it was.
    """

    patch: Patch
    journal: Journal = field(default_factory=Journal)
    notes: tuple[str, ...] = ()
    failure: Exception | None = None
    declined: bool = False
    reason: str = ""

    def apply(
        self, requests: Requests, installed: Release | None, failure: Exception | None = None
    ) -> PatchStatus:
        """Apply the patch, and first those that it requires, if the gate allows it.

        installed: DeepSpeed, imported already. failure: the exception of that import.
        """
        request, verdict = requests.by_name[self.patch.name], None
        self.failure, self.declined = failure, False
        if not self.was_applied:
            self.notes = ()
        if failure is None and not self.journal.is_in_place:
            try:
                verdict = self._try_to_apply(requests, installed)
            except Exception as error:
                self.failure = error
                logger.debug("%s failed", self.patch.name, exc_info=error)
        status = self.status(request, installed, verdict)
        self.reason = "" if status.live else f"{status.state.value} ({status.reason})"
        return status

    def unapply(self) -> None:
        """Take the patch back, even if its `deactivate` raises."""
        self.declined, self.reason = True, "taken back"
        self._undo()

    def _undo(self) -> None:
        try:
            if self.patch.deactivate and self.was_applied:
                self.patch.function(self.patch.deactivate)()
        finally:
            self.journal.remove()
            self.notes = ()

    @property
    def was_applied(self) -> bool:
        """Return True if the patch was applied and not taken back, live or replaced since."""
        return bool(self.journal.layers)

    def status(
        self, request: Request, installed: Release | None, verdict: Verdict | None = None
    ) -> PatchStatus:
        """Return the status from the live objects; without a verdict, asks the gate if needed."""
        states = self.journal.states()
        if states:
            state, reason = _state_of_wrappers(states)
        elif isinstance(self.failure, ImportFails):  # the import raises without the patch, too
            state, reason = State.REFUSED, str(self.failure)
        elif self.failure is not None:
            state, reason = State.FAILED, f"{type(self.failure).__name__}: {self.failure}"
        elif not request.wanted:
            state, reason = State.DISABLED, request.why
        else:
            verdict = verdict or gate.check(self.patch, request.force, installed)
            state, reason = verdict.state, verdict.reason
            if verdict.may_apply and self.declined:
                reason = "taken back, or left out, by a call"
        return PatchStatus(
            name=self.patch.name,
            state=state,
            reason=reason,
            installed=installed.text if installed else None,
            upstream=self.patch.upstream,
            notes=self.notes,
            targets={key: state for key, (state, _) in states.items()},
        )

    def _try_to_apply(self, requests: Requests, installed: Release | None) -> Verdict:
        force = requests.by_name[self.patch.name].force
        verdict = gate.check_alone(self.patch, installed, force)
        for name in self.patch.requires if verdict.may_apply else ():
            required = lifecycles[name].apply(requests, installed)
            if not required.live:
                return verdict.blocked_by(name, required)
        modules = dict.fromkeys(target.module for target in verdict.targets)
        if new := [module for module in modules if not shape.is_loaded(module)]:
            for module in new:
                gate.load(module)
            # The import may have replaced a function.
            verdict = gate.check_alone(self.patch, installed, force)
        if verdict.may_apply:
            self._install(verdict)
        return verdict

    def _install(self, verdict: Verdict) -> None:
        patch, was_applied = self.patch, self.was_applied
        self.journal.install(verdict.targets, lambda target: patch.function(target.wrapper))
        try:
            notes = patch.function(patch.activate)() if patch.activate and not was_applied else ()
        except BaseException:
            self._undo()
            raise
        self.notes = (*notes, *self.journal.names_out_of_reach())
        logger.debug("%s is applied to DeepSpeed %s", patch.name, verdict.release)
        for note in self.notes:
            logger.warning("%s: %s", patch.name, note)


def _state_of_wrappers(states: States) -> tuple[State, str]:
    replaced = [f"{k} is {text}" for k, (s, text) in states.items() if s is WrapperState.REPLACED]
    over = (f"{key} is {text}" for key, (_, text) in states.items() if text)
    in_place = f"{len(states)} of {len(states)} wrappers in place"
    reason = "; ".join(replaced or over) or in_place
    return State.FAILED if replaced else State.APPLIED, reason


class _Lifecycles(dict[str, Lifecycle]):
    def __missing__(self, name: str) -> Lifecycle:
        return self.setdefault(name, Lifecycle(registry.patch(name)))


#: The lifecycle of each patch, by its name; made when it is first asked for.
lifecycles = _Lifecycles()


def take_back(names: Iterable[str]) -> None:
    """Take patches back, each after those that require it.

    If one raises, the exception is raised after all were tried. Raises Misused, and takes nothing
    back, if one of them cannot be taken back now.
    """
    wanted = {*names}
    patches = [p for p in registry.patches().values() if {p.name, *p.requires} & wanted]
    patches.sort(key=lambda patch: bool(patch.requires))
    for patch in patches:
        if patch.may_unapply and lifecycles[patch.name].was_applied:
            patch.function(patch.may_unapply)()
    with ExitStack() as stack:  # in the reverse order: those that require another come first
        for patch in patches:
            stack.callback(lifecycles[patch.name].unapply)


def note(name: str, text: str) -> None:
    """Add a note to the status of a live patch."""
    lifecycle = lifecycles[name]
    if text not in lifecycle.notes:
        lifecycle.notes += (text,)
