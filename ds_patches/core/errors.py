"""Errors of the public surface. All derive from `DsPatchesError`."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_patches.core.state import PatchStatus


class DsPatchesError(Exception):
    """Base of every error this package raises itself. Another process can raise it again."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By the message: Exception's own would call the class with it in place of its arguments.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class ImportFails(DsPatchesError):
    """DeepSpeed, or a module of it, cannot be imported: no patch of it can be used."""


class FlagError(DsPatchesError, ValueError):
    """A flag, in a call or in the environment, that means nothing; the message lists what does."""


class UnknownPatch(FlagError):
    """A patch name that no patch has."""

    def __init__(self, name: str, known: Iterable[str], where: str) -> None:
        names = tuple(known)
        super().__init__(
            f"{where}: no patch is named {name!r}{nearest(name, names)}; "
            f"the patches are: {', '.join(names) or '(none)'}"
        )


class Refused(DsPatchesError, RuntimeError):
    """What a script asks for would train wrong; nothing was done, and the message says what helps.

    Where DeepSpeed refuses the same, it is caught by the class that DeepSpeed raises, too.
    """


class Misused(Refused, AssertionError):
    """Where DeepSpeed asserts; here also under ``python -O``."""


class NotChecked(DsPatchesError, RuntimeError):
    """A train check that can say nothing."""


class NotCovered(Refused, NotImplementedError):
    """Where DeepSpeed raises NotImplementedError."""


class RanksDisagree(DsPatchesError, RuntimeError):
    """Ranks of one engine do not have the same patches; the message names ranks and differences."""


class OtherRankFailed(DsPatchesError, RuntimeError):
    """Another rank raised, or did not come, so this one gives up too; the message says which."""


class PatchNotApplied(DsPatchesError, RuntimeError):
    """Patches that were asked for and are not live; `statuses` says why, one for each."""

    def __init__(self, statuses: Sequence[PatchStatus]) -> None:
        self.statuses = tuple(statuses)
        super().__init__("; ".join(f"{s.name} is {s.state.value}: {s.reason}" for s in statuses))


def nearest(word: str, words: Iterable[str], prefix: str = "") -> str:
    """Return " (did you mean 'this'?)" for the word that is meant, or nothing if none is near.

    prefix: what all of them begin with, and so says nothing.
    """
    from difflib import get_close_matches  # dear, and only errors need it

    rests = {one.removeprefix(prefix).lower(): one for one in words}
    found = get_close_matches(word.removeprefix(prefix).lower(), rests, n=1)
    return f" (did you mean {rests[found[0]]!r}?)" if found else ""
