"""The exceptions of this package. All derive from `DsPatchesError`."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_patches.core.state import PatchStatus


#: The longest quote of a value in a message, in characters.
_QUOTED = 80


class DsPatchesError(Exception):
    """Base class of every error that this package raises. Can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own would call the class with the message in place of its arguments.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class ImportFails(DsPatchesError):
    """DeepSpeed, or a module of it, cannot be imported, so no patch can be applied to it."""


class FlagError(DsPatchesError, ValueError):
    """A flag, of a call or in the environment, is unknown; the message lists the known ones."""


class UnknownPatch(FlagError):
    """A name that no patch has; `source` is the flag or the function that was given it."""

    def __init__(self, name: str, known: Iterable[str], source: str, meant: str = "") -> None:
        names = tuple(known)
        guess = f" (did you mean {meant!r}?)" if meant in names else nearest(name, names)
        super().__init__(
            f"{source}: no patch is named {cut(name)!r}{guess}; "
            f"the patches are: {', '.join(names) or '(none)'}"
        )


class Refused(DsPatchesError, RuntimeError):
    """A call that would train on wrong gradients; it changed nothing, and the message has the cure.

    Where DeepSpeed refuses the same call, a subclass also derives from the type it raises.
    """


class Misused(Refused, AssertionError):
    """A call that DeepSpeed refuses by an assertion; raised also under ``python -O``."""


class NotChecked(DsPatchesError, RuntimeError):
    """`train_check` has no verdict."""


class NotCovered(Refused, NotImplementedError):
    """A call for which DeepSpeed raises NotImplementedError."""


class RanksDisagree(DsPatchesError, RuntimeError):
    """Ranks of one engine do not have the same patches; the message names ranks and differences."""


class OtherRankFailed(DsPatchesError, RuntimeError):
    """Another rank raised or did not arrive, so this one stops too; the message says which."""


class PatchNotApplied(DsPatchesError, RuntimeError):
    """Requested patches are not live; `statuses` has the reason for each."""

    def __init__(self, statuses: Sequence[PatchStatus]) -> None:
        self.statuses = tuple(statuses)
        super().__init__("; ".join(f"{s.name} is {s.state.value}: {s.reason}" for s in statuses))


def cut(text: str) -> str:
    """Shorten a value for a message."""
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."


def nearest(word: str, words: Iterable[str], prefix: str = "") -> str:
    """Return " (did you mean 'word'?)" for the most similar word, "" if none is similar.

    prefix: the beginning of all words, which is not compared.
    """
    from difflib import get_close_matches  # slow to import, and only errors need it

    if len(word) > _QUOTED:  # a name of 100 kB would take minutes
        return ""
    by_rest = {known.removeprefix(prefix).lower(): known for known in words}
    matches = get_close_matches(word.removeprefix(prefix).lower(), by_rest, n=1)
    return f" (did you mean {by_rest[matches[0]]!r}?)" if matches else ""
