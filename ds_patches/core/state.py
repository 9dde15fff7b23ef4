"""The states of patches and of their wrappers."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from ds_patches.core import columns
from ds_patches.core.patch import Link


class State(Enum):
    """The state of a patch in this process."""

    DISABLED = "disabled"
    NOT_INSTALLED = "not installed"
    OUT_OF_RANGE = "out of range"
    REFUSED = "refused"
    READY = "ready"
    APPLIED = "applied"
    FAILED = "failed"


class WrapperState(Enum):
    """The state of a wrapper of ours, read from the live object."""

    ON_TOP = "on top"
    WRAPPED_OVER = "wrapped over"
    REPLACED = "replaced"


@dataclass(frozen=True)
class PatchStatus:
    """The status of one patch at the moment of the call.

    installed: the version of DeepSpeed as its metadata has it, or None.
    notes: further facts for the user, for example which names a late `apply` cannot patch.
    targets: the state of each wrapper, by the key of its target; empty if the patch is not applied.
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
        """True if every call of a target passes our wrapper: on top, or beneath another one."""
        return bool(self.targets) and WrapperState.REPLACED not in self.targets.values()

    @property
    def brief(self) -> str:
        """The first part of `reason`, for one line."""
        if self.state is State.READY:
            return "not applied in this process"
        return re.split("; |\n", self.reason, maxsplit=1)[0]

    def as_json(self) -> dict[str, Any]:
        plain = asdict(self) | {"state": self.state.value, "live": self.live}
        return plain | {"targets": {key: state.value for key, state in self.targets.items()}}


class Statuses(dict[str, PatchStatus]):
    """Statuses of patches, by name; as text, one line for each."""

    def __str__(self) -> str:
        rows = [(s.name, s.state.value, s.brief) for s in self.values()]
        return "\n".join(columns.aligned(rows))
