"""May this patch be applied here? Version AND structure must say yes.

A patch that meets code it was not written for is worse than none, so an unknown shape is never
wrapped unless the user forces it by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_patches.core import imports, journal, live, registry, release, shape
from ds_patches.core.errors import BrokenPatch
from ds_patches.core.patch import Dependency, Patch, Place, Target
from ds_patches.core.release import Release
from ds_patches.core.state import PatchStatus, State

#: By place and shape, the releases that have it.
Recorded = Mapping[str, Mapping[str, shape.Spans]]


class Force(IntEnum):
    """How far the user overrides the gate; each level includes the ones before."""

    NO = 0
    #: Forced along with everything: an unknown version passes.
    VERSION = 1
    #: Forced by its own name: a changed shape passes too.
    SHAPE = 2


@dataclass(frozen=True)
class Drift:
    """A place whose shape is not the one that was recorded for the release.

    known: the releases that have the shape found, as spans; empty if none has it.
    """

    place: Place
    found: str
    known: str
    origin: str

    def __str__(self) -> str:
        came = f", live from {self.origin}" if self.origin else ""
        if self.known:
            return f"{self.place.key} is that of {self.known}{came}"
        if self.found in (shape.ABSENT, shape.UNREADABLE):
            return f"{self.place.key} is {self.found}{came}"
        return f"{self.place.key} has the unknown shape {self.found}{came}"


@dataclass(frozen=True)
class Verdict:
    """The gate's answer; `state` is READY when the patch may be applied.

    release: the one that DeepSpeed is treated as: by its source, where that and what it is said to
        be differ. None if it is not installed.
    """

    state: State
    reason: str
    installed: Release | None
    release: Version | None = None
    drift: tuple[Drift, ...] = ()

    @property
    def may_apply(self) -> bool:
        return self.state is State.READY

    def without(self, name: str, required: Verdict | PatchStatus) -> Verdict:
        """Return the verdict where a patch may not be applied, or is not live, that is required."""
        reason = f"needs {name}, which is {required.state.value}: {required.reason}"
        return replace(self, state=State.BLOCKED, reason=reason) if self.may_apply else self


def check(patch: Patch, force: Force = Force.NO) -> Verdict:
    """Judge a patch, and what it requires, against the installed DeepSpeed.

    Imports nothing of it, changes nothing.
    """
    try:
        verdict = _check(patch, force)
    except BrokenPatch as error:
        return Verdict(State.BROKEN, str(error), release.installed())
    for name in patch.requires if verdict.may_apply else ():
        required = check(registry.patch(name), force)
        if not required.may_apply:
            return verdict.without(name, required)
    return verdict


def read(patch: Patch) -> tuple[Recorded, list[Version]]:
    """Return what is recorded of a patch, and the releases at which anything of it changes.

    Raises BrokenPatch for one that no DeepSpeed could be judged by.
    """
    if patch.broken:
        raise BrokenPatch(patch.broken)
    try:
        recorded = shape.spans(patch)
        Version(patch.fixed_in or "0")
        if not (known := _releases(patch, recorded)):
            raise ValueError(f"nothing is of {patch.supported}")
        return recorded, known
    except Exception as error:
        why = f"{patch.package}, its shapes.json or releases: {type(error).__name__}: {error}"
        raise BrokenPatch(why) from error


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Raise BrokenPatch for what keeps a module of DeepSpeed from being imported."""
    try:
        yield
    except Exception as error:
        why = f"the import of {module} fails: {type(error).__name__}: {error}"
        raise BrokenPatch(why) from error


def _check(patch: Patch, force: Force) -> Verdict:
    recorded, known = read(patch)
    installed = release.installed()
    if installed is None:
        return Verdict(State.NOT_INSTALLED, "DeepSpeed is not installed", None)
    found = _Found(patch, recorded, installed.folder)
    source = _release_of_source(found, installed.version, known)
    told = installed.version
    in_range = told is None or release.covers(patch.supported, told)
    version = (source or told or known[-1]) if in_range else told
    assert version is not None
    like = version if in_range else source or known[-1]
    drift = () if version == source else tuple(map(found.drift_of, found.unlike(version, like)))
    state, reason = _judge(patch, installed, version, drift, force)
    return Verdict(state, reason, installed, version, drift)


def targets(patch: Patch, version: Version) -> tuple[Target, ...]:
    """Return the targets that this release has."""
    return tuple(t for t in patch.targets if release.covers(t.releases, version))


def places(patch: Patch, version: Version) -> tuple[Place, ...]:
    """Return these, and what the patch relies on besides."""
    relied_on = (d for d in patch.dependencies if release.covers(d.releases, version))
    return (*targets(patch, version), *relied_on)


def _releases(patch: Patch, recorded: Recorded) -> list[Version]:
    """Return the releases at which anything recorded begins or ends, oldest first."""
    ends = {
        end for of in recorded.values() for spans in of.values() for span in spans for end in span
    }
    every: tuple[Target | Dependency, ...] = (*patch.targets, *patch.dependencies)
    bounds = (SpecifierSet(place.releases) for place in every)
    ends |= {Version(bound.version) for specifier in bounds for bound in specifier}
    return sorted(end for end in ends if release.covers(patch.supported, end))


def _release_of_source(
    found: _Found, told: Version | None, known: Sequence[Version]
) -> Version | None:
    """Return the release whose recorded shapes the source has, all of them; None if there is none.

    Of several it is the one that DeepSpeed is said to be, or the next before.
    """
    candidates = known[::-1]
    if told is not None:
        in_range = [told] if release.covers(found.patch.supported, told) else []
        before = [version for version in candidates if version < told]
        candidates = [*in_range, *before, *(version for version in known if version > told)]
    return next((v for v in candidates if not any(found.unlike(v, v))), None)


class _Found:
    """The shapes that a patch's places have here, each looked at once, and those recorded."""

    def __init__(self, patch: Patch, recorded: Recorded, folder: Path) -> None:
        self.patch, self.recorded = patch, recorded
        self._folder = folder
        self._shapes: dict[str, str] = {}

    def unlike(self, version: Version, like: Version) -> Iterator[Place]:
        """Yield the places of one release that are not as they were recorded of another.

        A place that the other release does not have may be as any has it.
        """
        # Module by module: few source files are held at a time.
        for place in sorted(places(self.patch, version), key=lambda place: place.module):
            of = self.recorded.get(place.key, {})
            spans = of.get(self._shape(place))
            is_new = version != like and not any(shape.is_within(like, one) for one in of.values())
            if spans is None or not (is_new or shape.is_within(like, spans)):
                yield place

    def drift_of(self, place: Place) -> Drift:
        found = self._shape(place)
        known = shape.known(self.patch).get(place.key, {}).get(found, "")
        where = live.site(place) if imports.is_whole(place.module) else None
        origin = live.origin(journal.beneath_ours(live.raw(*where))) if where else ""
        return Drift(place, found, known, origin)

    def _shape(self, place: Place) -> str:
        if place.key not in self._shapes:
            with importing(place.module):
                self._shapes[place.key] = shape.of(place, self._folder)
        return self._shapes[place.key]


def _judge(
    patch: Patch, installed: Release, version: Version, drift: tuple[Drift, ...], force: Force
) -> tuple[State, str]:
    name = f"DeepSpeed {version}"
    if installed.version != version:
        name += f" (by its source; it is said to be {installed.text})"
    if patch.fixed_in is not None and version >= Version(patch.fixed_in):
        return State.FIXED_UPSTREAM, f"DeepSpeed {patch.fixed_in} and later need no patch"
    in_range = release.covers(patch.supported, version)
    if not in_range and not release.is_newer(patch.supported, version):
        return State.OUT_OF_RANGE, f"{name} is not in {patch.supported}"
    if not targets(patch, version):
        return State.OUT_OF_RANGE, f"{name} has nothing that the patch wraps"
    unwrappable = [d for d in drift if d.found == shape.ABSENT and isinstance(d.place, Target)]
    if unwrappable or (drift and force < Force.SHAPE):
        return State.SHAPE_CHANGED, _listed(unwrappable or drift)
    if not in_range and force < Force.VERSION:
        return State.UNKNOWN_VERSION, (
            f"{name} is newer than {patch.supported}; every shape is known, "
            f"DS_PATCHES_FORCE={patch.name} applies it"
        )
    if drift or not in_range:
        return State.READY, "forced: " + (_listed(drift) if drift else name)
    return State.READY, f"{name} is in {patch.supported}, every shape is known"


def _listed(drift: Sequence[Drift]) -> str:
    """Name the first; `doctor` has room for the others."""
    more = f", and {len(drift) - 1} more (see doctor -v)" if len(drift) > 1 else ""
    return f"{drift[0]}{more}"
