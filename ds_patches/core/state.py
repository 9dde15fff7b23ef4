"""States are values, not log lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from ds_patches.core.patch import Link


class State(Enum):
    """Where a patch stands in this process."""

    DISABLED = "disabled"
    NOT_INSTALLED = "not installed"
    OUT_OF_RANGE = "out of range"
    UNKNOWN_VERSION = "unknown version"
    SHAPE_CHANGED = "shape changed"
    FIXED_UPSTREAM = "fixed upstream"
    READY = "ready"
    PENDING = "pending"
    APPLIED = "applied"
    SHADOWED = "shadowed"
    FAILED = "failed"
    REVERTED = "reverted"


class Standing(Enum):
    """Where one wrapper of ours stands, read from the live object."""

    ON_TOP = "on top"
    WRAPPED_OVER = "wrapped over"
    REPLACED = "replaced"

    @property
    def reached(self) -> bool:
        """Whether a call still passes through the wrapper."""
        return self is not Standing.REPLACED


@dataclass(frozen=True)
class PatchStatus:
    """The truth about one patch at the moment of the call.

    installed: version of the installed DeepSpeed as its metadata spells it, or None.
    notes: what the user should know besides, for example what a late apply cannot reach.
    targets: live standing of each target, by its key; empty while the patch is not live.
    options: what it is applied with, or would be.
    """

    name: str
    state: State
    reason: str
    installed: str | None
    upstream: tuple[Link, ...]
    notes: tuple[str, ...]
    targets: Mapping[str, Standing]
    options: Mapping[str, str]

    @property
    def live(self) -> bool:
        """True while every wrapper is in the call path: on top, or beneath another library's."""
        installed = self.state in (State.APPLIED, State.SHADOWED)
        return installed and all(standing.reached for standing in self.targets.values())

    def as_json(self) -> dict[str, Any]:
        """The status in plain types, for `status --json`."""
        plain = asdict(self) | {"state": self.state.value, "live": self.live}
        return plain | {"targets": {key: where.value for key, where in self.targets.items()}}
