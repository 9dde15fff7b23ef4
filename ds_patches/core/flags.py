"""What the user wants: arguments of a call come before variables, and they before the default."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_patches.core import log
from ds_patches.core.errors import FlagError, UnknownPatch, nearest
from ds_patches.core.patch import Patch

PREFIX = "DS_PATCHES"
_SUFFIXES = ("", "_SKIP", "_STRICT", "_FORCE", "_LOG", "_PREFIX", "_STATUS_FILE")
#: All environment variables that mean something.
VARIABLES = tuple(PREFIX + suffix for suffix in _SUFFIXES)
#: Of those that are meant for this package, known or not.
_OURS = re.compile(f"{PREFIX}(_|$)").match
#: The variables that are lists of patches, and what else may stand in them.
_LISTS = {"": ("all", "none"), "_SKIP": (), "_FORCE": ()}

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

#: Of patches; a text is split at commas.
Names = Iterable[str] | str


@dataclass(frozen=True)
class Request:
    """What the user wants of one patch. `why` names the flag that decided.

    force: also where the release is newer than all that were tested, or its code is other.
    for_others: it is wanted only because another one requires it.
    """

    wanted: bool
    why: str
    force: bool
    for_others: bool = False


@dataclass(frozen=True)
class Requests:
    """All flags, read and checked.

    level: of what is logged; None: as the program has it.
    status_file: where rank 0 leaves the job's status; "" for nowhere.
    """

    strict: bool
    of: Mapping[str, Request]
    level: str | None = None
    status_file: str = ""


def read(
    patches: Mapping[str, Patch],
    *,
    only: Names | None = None,
    skip: Names | None = None,
    strict: bool | None = None,
    force: Names | None = None,
) -> Requests:
    """Merge the arguments of a call with the environment; changes nothing.

    Raises UnknownPatch or FlagError for anything that means nothing, listing what does.
    """
    env = _environment(patches)
    only, skip, force = _listed(only), _listed(skip) or (), _listed(force) or ()
    for argument, names in (("only", only or ()), ("skip", skip), ("force", force)):
        _must_be_known(names, [*patches], argument)
    wishes = {name: _wish(name, only, skip, env) for name in patches}
    forced = {*force, *_split(env.get(f"{PREFIX}_FORCE", ""))}
    # What a wanted patch requires is wanted too. Where that is left out by name, so are both.
    barred = {
        name: f"needs {one}, which is left out: {wishes[one][1]}"
        for name in patches
        for one in patches[name].requires
        if wishes[one][0] is False
    }
    for name in _split(env.get(PREFIX, "")) if only is None else only:
        if name in barred and wishes[name][0]:
            raise FlagError(f"{name} is asked for by name ({wishes[name][1]}), and {barred[name]}")
    wanted = [name for name, (wish, _) in wishes.items() if wish and name not in barred]
    needed = {one: name for name in wanted for one in patches[name].requires if one not in wanted}
    requests = {}
    for name, (wish, why) in wishes.items():
        if name in needed:
            why = f"required by {needed[name]}"
        elif wish and name in barred:
            why = barred[name]
        is_wanted = name in wanted or name in needed
        requests[name] = Request(is_wanted, why, name in forced, for_others=name in needed)
    if strict is None:
        strict = _switch(f"{PREFIX}_STRICT", env.get(f"{PREFIX}_STRICT", "0"))
    level = env.get(f"{PREFIX}_LOG")
    if level is not None and level.lower() not in log.LEVELS:
        raise _no_choice(f"{PREFIX}_LOG", level, log.LEVELS, log.LEVELS)
    return Requests(strict, requests, level, env.get(f"{PREFIX}_STATUS_FILE", ""))


def misspelt(env: Mapping[str, str]) -> list[str]:
    """Say of variables that are not ours which of ours they are meant to be: DS_PATCHS."""
    from difflib import get_close_matches  # dear, and only commands ask

    others = [name for name in env if not _OURS(name)]
    near = {name: get_close_matches(name, VARIABLES, 1, cutoff=0.88) for name in others}
    return [f"{name} means nothing; {one[0]} does" for name, one in near.items() if one]


def is_strict() -> bool:
    """Whether the environment asks for strictness, whatever else in it means nothing."""
    return os.environ.get(f"{PREFIX}_STRICT", "").strip().lower() in _YES


def _environment(patches: Mapping[str, Patch]) -> dict[str, str]:
    """Return our variables; raises for one that means nothing, since a typo would be silent.

    An empty one is left out: it means the same as an unset one.
    """
    env = {k: v.strip() for k, v in os.environ.items() if v and _OURS(k)}
    for name in env:
        if name not in VARIABLES:
            guess = nearest(name, VARIABLES, PREFIX)
            if (patch := name.removeprefix(f"{PREFIX}_").lower()) in patches:
                guess = f"; {PREFIX}_SKIP={patch} leaves a patch out"
            known = ", ".join(VARIABLES)
            raise FlagError(f"{name} means nothing{guess}; the variables are: {known}")
    for suffix, words in _LISTS.items():
        variable = PREFIX + suffix
        _must_be_known(_listed(env.get(variable)) or (), [*words, *patches], variable)
    if "none" in (chosen := _split(env.get(PREFIX, ""))) and len(chosen) > 1:
        raise FlagError(f"{PREFIX} is {env[PREFIX]!r}; `none` stands alone")
    return env


def _wish(
    name: str, only: tuple[str, ...] | None, skip: tuple[str, ...], env: Mapping[str, str]
) -> tuple[bool | None, str]:
    """Say whether a patch is wanted, and why; None where nothing is said of it by name."""
    if name in skip:
        return False, "skipped by the call"
    if only is not None:
        return name in only or None, "the call's choice"
    if name in _split(env.get(f"{PREFIX}_SKIP", "")):
        return False, f"{PREFIX}_SKIP={env[f'{PREFIX}_SKIP']}"
    if listed := _split(env.get(PREFIX, "")):
        return name in listed or "all" in listed or None, f"{PREFIX}={env[PREFIX]}"
    return True, "on by default"


def _must_be_known(names: Iterable[str], known: Sequence[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise UnknownPatch(name, known, where)


def _listed(names: Names | None) -> tuple[str, ...] | None:
    if isinstance(names, str):
        return _split(names) or (names,)  # no name at all is an error, like a wrong one
    if isinstance(names, bool):
        raise FlagError(f"{names} stands where names of patches are wanted")
    return None if names is None else tuple(names)


def _split(text: str) -> tuple[str, ...]:
    """Split a list at commas, or at plus signs: Slurm's `--export` takes commas for itself."""
    return tuple(part.strip() for part in text.replace("+", ",").split(",") if part.strip())


def _switch(where: str, text: str) -> bool:
    """Return yes or no. Raises FlagError for any other text."""
    if text.lower() not in _YES + _NO:
        raise _no_choice(where, text, ("0", "1"), _YES + _NO)
    return text.lower() in _YES


def _no_choice(where: str, text: str, choices: Iterable[str], near: Iterable[str]) -> FlagError:
    guess = nearest(text, near)
    return FlagError(f"{where} is {text!r}{guess}; the choices are: {', '.join(choices)}")
