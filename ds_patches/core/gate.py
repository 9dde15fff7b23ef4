"""The gate: decides by version and code if the installed DeepSpeed may be patched.

The version decides with which recorded release the code is compared. Every place that the patch
names in that release has to be as it was recorded, and so has every target that it leaves out
there: half a patch on mixed code would train on wrong gradients without an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module

from packaging.version import Version

from ds_patches.core import live, registry, release, shape
from ds_patches.core.errors import ImportFails
from ds_patches.core.patch import Dependency, Patch, Place, Target
from ds_patches.core.release import Release
from ds_patches.core.state import PatchStatus, State


@dataclass(frozen=True)
class Verdict:
    """The gate's answer; `state` is READY if the patch may be applied.

    release: DeepSpeed's version; None if it is not installed, or names no version.
    targets: the functions that the patch wraps in this release.
    drift: the places whose code differs from the recorded code of the release.
    is_fixed: the installed code is that of a later release, which has the fix.
    """

    state: State
    reason: str
    release: Version | None = None
    targets: tuple[Target, ...] = ()
    drift: tuple[str, ...] = ()
    is_fixed: bool = False

    @property
    def may_apply(self) -> bool:
        return self.state is State.READY

    def blocked_by(self, name: str, required: Verdict | PatchStatus) -> Verdict:
        """Return the verdict if a required patch may not be applied, or is not live."""
        reason = f"needs {name}, which is {required.state.value}: {required.reason}"
        return replace(self, state=required.state, reason=reason)


def check(patch: Patch, force: bool = False, installed: Release | None = None) -> Verdict:
    """Judge a patch, and the patches that it requires; imports nothing of DeepSpeed.

    installed: looked up if it is not given.
    """
    installed = installed or release.installed()
    verdict = check_alone(patch, installed, force)
    for name in patch.requires if verdict.may_apply else ():
        required = check_alone(registry.patch(name), installed, force)
        if not required.may_apply:
            return verdict.blocked_by(name, required)
    return verdict


def load(module: str) -> None:
    """Import a module of DeepSpeed. Raises ImportFails if the import raises."""
    try:
        import_module(module)
    except Exception as error:
        raise ImportFails(_failed(module, error)) from error


def targets(patch: Patch, version: Version) -> tuple[Target, ...]:
    """Return the targets that the patch wraps in a release."""
    return tuple(t for t in patch.targets if release.covers(t.releases, version))


def places(patch: Patch, version: Version) -> tuple[Target | Dependency, ...]:
    """Return the targets and the dependencies that the patch has in a release."""
    dependencies = (d for d in patch.dependencies if release.covers(d.releases, version))
    return (*targets(patch, version), *dependencies)


def check_alone(patch: Patch, installed: Release | None, force: bool) -> Verdict:
    """Judge a patch without the patches that it requires."""
    if installed is None:
        return Verdict(State.NOT_INSTALLED, "DeepSpeed is not installed")
    if (version := installed.version) is None:
        reason = f"DeepSpeed's version is {installed.text}: no release to compare its code with"
        return Verdict(State.REFUSED, reason)
    name, nearest = f"DeepSpeed {version}", shape.nearest_release(version)
    if nearest is None or not release.covers(patch.supported, nearest):
        return Verdict(State.OUT_OF_RANGE, f"{name} is not in {patch.supported}", version)
    if not (wrapped := targets(patch, nearest)):
        return Verdict(
            State.OUT_OF_RANGE, f"{name} has none of the functions that the patch wraps", version
        )
    by_key = {place.key: place for place in (*patch.targets, *places(patch, nearest))}
    shapes = {}
    for key, place in by_key.items():
        try:
            shapes[key] = shape.of(place, installed.folder)
        except Exception as error:  # the source cannot be parsed
            return Verdict(State.REFUSED, _failed(place.module, error))
    missing = [p for p in places(patch, nearest) if shapes[p.key] == shape.ABSENT]
    changed = (p for key, p in by_key.items() if shapes[key] != shape.of_release(p, nearest))
    drifted = [*dict.fromkeys((*missing, *changed))]
    if drifted and all(_is_fixed(patch, target, shapes[target.key]) for target in wrapped):
        reason = f"{name} has later code, in which it is fixed"
        return Verdict(State.OUT_OF_RANGE, reason, version, is_fixed=True)
    # A missing target cannot be wrapped, forced or not.
    absent = [p for p in missing if isinstance(p, Target)]
    drift = tuple(_drift(place, shapes[place.key]) for place in absent or drifted)
    suffix = f", and {len(drift) - 1} more (see doctor -v)" if len(drift) > 1 else ""
    if absent or (drift and not force):
        return Verdict(State.REFUSED, f"{drift[0]}{suffix}", version, drift=drift)
    is_tested = release.covers(patch.supported, version)
    if not is_tested and not force:
        reason = f"{name} is newer than {patch.supported}; every shape is known, "
        reason += f"DS_PATCHES_FORCE={patch.name} applies it"
        return Verdict(State.REFUSED, reason, version)
    reason = f"{name} is in {patch.supported}, every shape is known"
    if drift or not is_tested:
        reason = f"forced: {drift[0] if drift else name}{suffix}"
    return Verdict(State.READY, reason, version, wrapped, drift)


def _failed(module: str, error: Exception) -> str:
    return f"the import of {module} fails: {type(error).__name__}: {error}"


def _is_fixed(patch: Patch, target: Target, digest: str) -> bool:
    """Return True if a shape is only of releases later than any in which the target is wrapped."""
    recorded, spans = shape.recorded().releases, shape.known(target).get(digest, "")
    having = {v for v in recorded if shape.lies_in(v, spans)}
    conditions = (patch.supported, target.releases)
    wrapping = {v for v in recorded if all(release.covers(c, v) for c in conditions)}
    return bool(having and wrapping) and max(having) > max(wrapping) and not having & wrapping


def _drift(place: Place, digest: str) -> str:
    """Describe a place whose shape is not the recorded one."""
    is_word = digest in (shape.ABSENT, shape.UNREADABLE)
    text = f"{place.key} is {digest}" if is_word else f"{place.key} has the unknown shape {digest}"
    if spans := shape.known(place).get(digest):
        text = f"{place.key} is that of {spans}"
    if site := live.site(place) if shape.is_loaded(place.module) else None:
        foreign = next(value for value in live.chain(live.raw(*site)) if not live.layer_of(value))
        text += f", live from {live.origin(foreign)}"
    return text
