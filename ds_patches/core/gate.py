"""May this patch be applied here? Version AND structure must say yes.

A patch that meets code it was not written for is worse than none, so an unknown shape is never
wrapped unless the user forces it by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from packaging.version import Version

from ds_patches.core import imports, live, release, shape
from ds_patches.core.patch import Fact, Patch, Place, Target
from ds_patches.core.release import Release
from ds_patches.core.state import State


class Force(IntEnum):
    """How far the user overrides the gate; each level includes the ones before."""

    NO = 0
    #: Forced along with everything: an unknown version passes.
    VERSION = 1
    #: Forced by its own name: a changed shape passes too.
    SHAPE = 2


@dataclass(frozen=True)
class Drift:
    """A place whose shape no tested release has."""

    place: Place
    found: str
    known: tuple[str, ...]
    origin: str

    def __str__(self) -> str:
        came = f", live from {self.origin}" if self.origin else ""
        if self.found in (shape.ABSENT, shape.UNREADABLE):
            return f"{self.place.key} is {self.found}{came}"
        return f"{self.place.key} has the unknown shape {self.found}{came}"


@dataclass(frozen=True)
class Verdict:
    """The gate's answer; `state` is READY when the patch may be applied."""

    state: State
    reason: str
    installed: Release | None
    drift: tuple[Drift, ...] = ()

    @property
    def may_apply(self) -> bool:
        return self.state is State.READY


def check(patch: Patch, force: Force = Force.NO) -> Verdict:
    """Judge one patch against the installed DeepSpeed; imports nothing, changes nothing."""
    installed = release.installed()
    if installed is None:
        return Verdict(State.NOT_INSTALLED, "DeepSpeed is not installed", None)
    if installed.version is None:
        reason = f"DeepSpeed in {installed.folder} has no package metadata, hence no known release"
        return Verdict(State.UNKNOWN_VERSION, reason, installed)
    drift = tuple(_drift(patch, installed, installed.version))
    state, reason = _judge(patch, installed.version, drift, force)
    return Verdict(state, reason, installed, drift)


def targets(patch: Patch, version: Version) -> tuple[Target, ...]:
    """Return the targets that this release has."""
    return tuple(t for t in patch.targets if release.covers(t.releases, version))


def facts(patch: Patch, version: Version) -> tuple[Fact, ...]:
    """Return the facts that the patch relies on in this release."""
    return tuple(f for f in patch.facts if release.covers(f.releases, version))


def _judge(
    patch: Patch, version: Version, drift: tuple[Drift, ...], force: Force
) -> tuple[State, str]:
    if patch.fixed_in is not None and version >= Version(patch.fixed_in):
        return State.FIXED_UPSTREAM, f"DeepSpeed {patch.fixed_in} and later need no patch"
    in_range = release.covers(patch.supported, version)
    if not in_range and not release.is_newer(patch.supported, version):
        return State.OUT_OF_RANGE, f"DeepSpeed {version} is not in {patch.supported}"
    if not targets(patch, version):
        return State.OUT_OF_RANGE, f"DeepSpeed {version} has nothing that the patch wraps"
    unwrappable = [d for d in drift if d.found == shape.ABSENT and isinstance(d.place, Target)]
    if unwrappable or (drift and force < Force.SHAPE):
        return State.SHAPE_CHANGED, _listed(unwrappable or drift)
    if not in_range and force < Force.VERSION:
        return State.UNKNOWN_VERSION, (
            f"DeepSpeed {version} is newer than {patch.supported}; every shape is known, "
            f"DS_PATCHES_FORCE={patch.name} applies it"
        )
    if drift or not in_range:
        return State.READY, "forced: " + (_listed(drift) if drift else f"DeepSpeed {version}")
    return State.READY, f"DeepSpeed {version} is in {patch.supported}, every shape is known"


def _listed(drift: Sequence[Drift]) -> str:
    """Name the first; `doctor` has room for the others."""
    more = f", and {len(drift) - 1} more (see doctor)" if len(drift) > 1 else ""
    return f"{drift[0]}{more}"


def _drift(patch: Patch, installed: Release, version: Version) -> Iterator[Drift]:
    recorded = shape.known(patch)
    places = (*targets(patch, version), *facts(patch, version))
    # Module by module: each source file is parsed once, and few are held at a time.
    in_order = sorted(places, key=lambda place: place.module)
    shapes = {place.key: shape.of(place, installed.folder) for place in in_order}
    for place in places:
        found = shapes[place.key]
        known = tuple(recorded.get(place.key, ()))
        if found not in known:
            yield Drift(place, found, known, _live_origin(place))


def _live_origin(place: Place) -> str:
    if not imports.is_whole(place.module) or (where := live.site(place)) is None:
        return ""
    return live.origin(live.raw(*where))
