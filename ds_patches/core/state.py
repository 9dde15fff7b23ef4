"""Where patches and their wrappers stand."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from ds_patches.core import columns
from ds_patches.core.patch import Link


class State(Enum):
    """Where a patch stands in this process."""

    DISABLED = "disabled"
    BROKEN = "broken"
    NOT_INSTALLED = "not installed"
    OUT_OF_RANGE = "out of range"
    UNKNOWN_VERSION = "unknown version"
    SHAPE_CHANGED = "shape changed"
    BLOCKED = "blocked"
    READY = "ready"
    PENDING = "pending"
    APPLIED = "applied"
    SHADOWED = "shadowed"
    FAILED = "failed"
    REVERTED = "reverted"


class WrapperState(Enum):
    """Where one wrapper of ours stands, read from the live object."""

    ON_TOP = "on top"
    WRAPPED_OVER = "wrapped over"
    REPLACED = "replaced"


def all_reached(wrappers: Collection[WrapperState]) -> bool:
    """Whether there are wrappers, and a call passes through each."""
    return bool(wrappers) and WrapperState.REPLACED not in wrappers


@dataclass(frozen=True)
class PatchStatus:
    """The truth about one patch at the moment of the call.

    installed: the version of DeepSpeed as its metadata spells it, or None.
    notes: what the user should know besides, as what a late apply cannot reach.
    targets: by the key of each; empty while the patch is not live.
    """

    name: str
    state: State
    reason: str
    installed: str | None
    upstream: tuple[Link, ...]
    notes: tuple[str, ...]
    targets: Mapping[str, WrapperState] = field(hash=False)

    def __str__(self) -> str:
        return f"{self.name} is {self.state.value}: {self.brief}"

    @property
    def live(self) -> bool:
        """True while every wrapper is in the call path: on top, or beneath another library's."""
        return all_reached(self.targets.values())

    @property
    def brief(self) -> str:
        """Why, in so few words that it fits on a line; `reason` has all of them."""
        if self.state is State.READY:
            return "not applied in this process"
        return re.split("; |\n", self.reason, maxsplit=1)[0]

    def as_json(self) -> dict[str, Any]:
        plain = asdict(self) | {"state": self.state.value, "live": self.live}
        return plain | {"targets": {key: where.value for key, where in self.targets.items()}}


class Statuses(dict[str, PatchStatus]):
    """Statuses of several patches, by name; as a text one line for each."""

    def __str__(self) -> str:
        rows = [(s.name, s.state.value, s.brief) for s in self.values()]
        return "\n".join(columns.aligned(rows))
