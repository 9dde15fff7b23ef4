"""May this patch be applied here? Version AND structure must say yes.

A patch that meets code it was not written for is worse than none, so an unknown shape is never
wrapped unless the user forces it by name.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from ds_patches.core import imports, live, once, registry, release, shape
from ds_patches.core.errors import ImportFails
from ds_patches.core.patch import Dependency, Patch, Place, Target
from ds_patches.core.release import Release
from ds_patches.core.state import PatchStatus, State


@dataclass(frozen=True)
class Verdict:
    """The gate's answer; `state` is READY when the patch may be applied.

    release: the one that DeepSpeed is treated as, by its source rather than by what it is said to
        be. None if it is not installed, or cannot be imported.
    drift: what of its code is not as it was recorded of the release.
    is_fixed: what the patch cures was fixed here, as in later releases.
    """

    state: State
    reason: str
    release: Version | None = None
    drift: tuple[str, ...] = ()
    is_fixed: bool = False

    @property
    def may_apply(self) -> bool:
        return self.state is State.READY

    def without(self, name: str, required: Verdict | PatchStatus) -> Verdict:
        """Return the verdict where a patch may not be applied, or is not live, that is required."""
        reason = f"needs {name}, which is {required.state.value}: {required.reason}"
        return replace(self, state=State.BLOCKED, reason=reason) if self.may_apply else self


def check(patch: Patch, force: bool = False) -> Verdict:
    """Judge a patch, and what it requires, against the installed DeepSpeed; imports nothing of it.

    A call of the API looks at each patch once; and again when modules of its were imported
    meanwhile, as somebody may have replaced a function there.
    """
    every = (*patch.targets, *patch.dependencies)
    imported = sum(imports.is_whole(module) for module in {place.module for place in every})
    try:
        verdict = _look(patch, force, imported)
    except ImportFails as error:
        return Verdict(State.BROKEN, str(error))
    for name in patch.requires if verdict.may_apply else ():
        required = check(registry.patch(name), force)
        if not required.may_apply:
            return verdict.without(name, required)
    return verdict


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Raise ImportFails for what keeps a module of DeepSpeed from being imported."""
    try:
        yield
    except Exception as error:
        why = f"the import of {module} fails: {type(error).__name__}: {error}"
        raise ImportFails(why) from error


def targets(patch: Patch, version: Version) -> tuple[Target, ...]:
    """Return the targets that this release has."""
    return tuple(t for t in patch.targets if release.covers(t.releases, version))


def places(patch: Patch, version: Version) -> tuple[Target | Dependency, ...]:
    """Return these, and what the patch relies on besides."""
    relied_on = (d for d in patch.dependencies if release.covers(d.releases, version))
    return (*targets(patch, version), *relied_on)


@once.per_call
def _look(patch: Patch, force: bool, imported: int) -> Verdict:
    if (installed := release.installed()) is None:
        return Verdict(State.NOT_INSTALLED, "DeepSpeed is not installed")
    found, told = _Found(patch, installed.folder), installed.version
    known = [one for one in shape.recorded().releases if release.covers(patch.supported, one)]
    newest = known[-1] if known else told or Version("0")
    in_range = told is None or release.covers(patch.supported, told)
    if told and in_range and told not in known:
        known = sorted([*known, told])
    # Its source tells which release it is: the one that it is said to be, or else the next before.
    before = len(known) if told is None else bisect(known, told)
    every = (*reversed(known[:before]), *known[before:])
    source = next((v for v in every if not any(found.unlike(v, v))), None)
    version = told if told and not in_range else source or told or newest
    like = version if in_range else source or newest
    drifted = () if version == source else found.unlike(version, like)
    drift = {place: _drift(place, found.shape_of(place)) for place in drifted}
    wrapped = targets(patch, version)
    if drift and wrapped and all(found.is_fixed(target) for target in wrapped):
        reason = f"DeepSpeed {told or version} has later code, in which it is fixed"
        return Verdict(State.OUT_OF_RANGE, reason, version, is_fixed=True)
    lacking = [p for p in drift if isinstance(p, Target) and found.shape_of(p) == shape.ABSENT]
    if lacking:  # nothing can be wrapped there, whoever forces it
        drift, force = {place: drift[place] for place in lacking}, False
    texts = tuple(drift.values())
    return Verdict(*_judge(patch, installed, version, texts, force), version, texts)


class _Found:
    """The shapes that a patch's places have here, each looked at once."""

    def __init__(self, patch: Patch, folder: Path) -> None:
        self._patch, self._folder = patch, folder
        self._shapes: dict[str, str] = {}

    def unlike(self, version: Version, like: Version) -> Iterator[Place]:
        """Yield the places of one release that are not as they were recorded of another."""
        for place in sorted(places(self._patch, version), key=lambda place: place.module):
            if not shape.has(like, shape.known(place).get(self.shape_of(place), "")):
                yield place

    def is_fixed(self, target: Target) -> bool:
        """Whether its code is recorded, of later releases than any in which it is wrapped."""
        spans = shape.known(target).get(self.shape_of(target), "")
        supported, recorded = self._patch.supported, shape.recorded().releases
        of = [one for one in recorded if shape.has(one, spans)]
        wraps = [
            one
            for one in recorded
            if release.covers(supported, one) and release.covers(target.releases, one)
        ]
        return bool(of and wraps) and max(of) > max(wraps) and not {*of} & {*wraps}

    def shape_of(self, place: Place) -> str:
        if place.key not in self._shapes:
            with importing(place.module):
                self._shapes[place.key] = shape.of(place, self._folder)
        return self._shapes[place.key]


def _drift(place: Place, found: str) -> str:
    is_named = found in (shape.ABSENT, shape.UNREADABLE)
    text = f"{place.key} is {found}" if is_named else f"{place.key} has the unknown shape {found}"
    if releases := shape.known(place).get(found):
        text = f"{place.key} is that of {releases}"
    if where := live.site(place) if imports.is_whole(place.module) else None:
        text += f", live from {live.origin(live.beneath_ours(live.raw(*where)))}"
    return text


def _judge(
    patch: Patch, installed: Release, version: Version, drift: Sequence[str], force: bool
) -> tuple[State, str]:
    name = f"DeepSpeed {version}"
    if installed.version != version:
        name += f" (by its source; it is said to be {installed.text})"
    in_range = release.covers(patch.supported, version)
    # Whoever recorded a release that the patch is not for has looked whether it needs the patch.
    looked_at = version in shape.recorded().releases
    if not in_range and (looked_at or not release.is_newer(patch.supported, version)):
        return State.OUT_OF_RANGE, f"{name} is not in {patch.supported}"
    if not targets(patch, version):
        return State.OUT_OF_RANGE, f"{name} has nothing that the patch wraps"
    more = f", and {len(drift) - 1} more (see doctor -v)" if len(drift) > 1 else ""
    if drift and not force:
        return State.SHAPE_CHANGED, f"{drift[0]}{more}"
    if not in_range and not force:
        return State.UNKNOWN_VERSION, (
            f"{name} is newer than {patch.supported}; every shape is known, "
            f"DS_PATCHES_FORCE={patch.name} applies it"
        )
    if drift or not in_range:
        return State.READY, f"forced: {drift[0] if drift else name}{more}"
    return State.READY, f"{name} is in {patch.supported}, every shape is known"
