"""Errors of the public surface. All derive from `DsPatchesError`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_patches.core.state import PatchStatus


class DsPatchesError(Exception):
    """Base of every error this package raises itself."""


class BrokenPatch(DsPatchesError):
    """A patch folder does not hold what the contract asks for."""


class FlagError(DsPatchesError, ValueError):
    """A flag, in a call or in the environment, that means nothing; the message lists what does."""


class UnknownPatch(FlagError):
    """A patch name that no folder has."""

    def __init__(self, name: str, known: Iterable[str], where: str) -> None:
        super().__init__(
            f"{where}: no patch is named {name!r}; the patches are: {', '.join(known) or '(none)'}"
        )


class AlreadyApplied(DsPatchesError):
    """The patch is live with other options."""


class RanksDisagree(DsPatchesError, RuntimeError):
    """Ranks of one engine do not have the same patches; the message names ranks and differences."""


class PatchNotApplied(DsPatchesError, RuntimeError):
    """Patches that were asked for and are not live; `statuses` says why, one for each."""

    def __init__(self, statuses: Sequence[PatchStatus]) -> None:
        self.statuses = tuple(statuses)
        super().__init__("; ".join(f"{s.name} is {s.state.value}: {s.reason}" for s in statuses))
