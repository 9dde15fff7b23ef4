"""The flags: arguments of a call override variables, and variables override defaults."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_patches.core import log
from ds_patches.core.errors import FlagError, UnknownPatch, cut, nearest
from ds_patches.core.patch import Patch

PREFIX = "DS_PATCHES"
#: All environment variables of this package.
VARIABLES = tuple(PREFIX + suffix for suffix in ("", "_SKIP", "_STRICT", "_FORCE", "_LOG"))
#: Matches a variable that is meant for this package, known or not.
_OURS = re.compile(f"{PREFIX}(_|$)").match
#: The variables that list patches, and the other words that each accepts.
_LISTS = {"": ("all", "none"), "_SKIP": (), "_FORCE": ()}

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
#: The word to suggest for a switch where the name of a patch is expected.
_SWITCHES = dict.fromkeys(_YES, "all") | dict.fromkeys(_NO, "none")

#: Names of patches; a text is split at commas.
Names = Iterable[str] | str


@dataclass(frozen=True)
class Request:
    """The user's wish for one patch.

    why: the flag that decided.
    force: apply it also to a release newer than the tested ones, or to unknown code.
    """

    wanted: bool
    why: str
    force: bool


@dataclass(frozen=True)
class Requests:
    """All flags, read and checked.

    level: the lowest level that is logged; None keeps the logger's.
    """

    strict: bool
    by_name: Mapping[str, Request]
    level: str | None = None

    @property
    def wanted(self) -> list[str]:
        return [name for name, request in self.by_name.items() if request.wanted]


def read(
    patches: Mapping[str, Patch],
    *,
    only: Names | None = None,
    skip: Names | None = None,
    strict: bool | None = None,
    force: Names | None = None,
) -> Requests:
    """Merge the arguments of a call with the environment; changes nothing.

    Raises UnknownPatch or FlagError, with the known values, for anything unknown.
    """
    env = _environment(patches)
    only = _listed(only, patches, "only")
    skip = _listed(skip, patches, "skip") or ()
    force = _listed(force, patches, "force") or ()
    wishes = {name: _wish(patch, only, skip, env) for name, patch in patches.items()}
    forced = {*force, *_split(env.get(f"{PREFIX}_FORCE", ""))}
    # A patch that a wanted one requires is wanted too; if it is left out by name, both are.
    barred = {
        name: f"needs {required}, which is left out: {wishes[required][1]}"
        for name in patches
        for required in patches[name].requires
        if wishes[required][0] is False
    }
    for name in _split(env.get(PREFIX, "")) if only is None else only:
        if name in barred and wishes[name][0]:
            raise FlagError(f"{name} is asked for by name ({wishes[name][1]}) and {barred[name]}")
    wanted = [name for name, (wish, _) in wishes.items() if wish and name not in barred]
    needed_by = {required: name for name in wanted for required in patches[name].requires}
    requests = {}
    for name, (wish, why) in wishes.items():
        if name not in wanted and name in needed_by:
            why = f"required by {needed_by[name]}"
        elif wish and name in barred:
            why = barred[name]
        is_wanted = name in wanted or name in needed_by
        requests[name] = Request(is_wanted, why, name in forced)
    switch = _choice(env, "_STRICT", ("0", "1"), _YES + _NO)
    level = _choice(env, "_LOG", log.LEVELS, log.LEVELS)
    strict = switch in _YES if strict is None else strict
    return Requests(strict, requests, level)


def misspelt(env: Mapping[str, str]) -> list[str]:
    """Return a hint for each variable whose name resembles one of ours: DS_PATCHS."""
    from difflib import get_close_matches  # slow to import, and only commands need it

    foreign = [name for name in env if not _OURS(name)]
    similar = {name: get_close_matches(name, VARIABLES, 1, cutoff=0.88) for name in foreign}
    return [f"{name} is unknown; did you mean {k[0]}?" for name, k in similar.items() if k]


def is_strict() -> bool:
    """Return True if the environment asks for strict mode, even if another flag is invalid."""
    return os.environ.get(f"{PREFIX}_STRICT", "").strip().lower() in _YES


def _environment(patches: Mapping[str, Patch]) -> dict[str, str]:
    """Return our variables that are not blank. Raises for an unknown one, which may be a typo."""
    env = {k: v.strip() for k, v in os.environ.items() if v.strip() and _OURS(k)}
    for name in env:
        if name not in VARIABLES:
            guess = nearest(name, VARIABLES, PREFIX)
            if (patch := name.removeprefix(f"{PREFIX}_").lower()) in patches:
                guess = f"; {PREFIX}_SKIP={patch} leaves that patch out"
            known = ", ".join(VARIABLES)
            raise FlagError(f"{name} is unknown{guess}; the variables are: {known}")
    for suffix, words in _LISTS.items():
        _listed(env.get(PREFIX + suffix), [*words, *patches], PREFIX + suffix)
    if "none" in (chosen := _split(env.get(PREFIX, ""))) and len(chosen) > 1:
        raise FlagError(f"{PREFIX} is {cut(env[PREFIX])!r}; use `none` without other words")
    return env


def _wish(
    patch: Patch, only: tuple[str, ...] | None, skip: tuple[str, ...], env: Mapping[str, str]
) -> tuple[bool | None, str]:
    """Return whether a patch is wanted, and why; None if it is merely not listed."""
    name = patch.name
    if name in skip:
        return False, "skipped by the call"
    if only is not None:
        return name in only or None, "the call's choice"
    if name in _split(env.get(f"{PREFIX}_SKIP", "")):
        return False, f"{PREFIX}_SKIP={cut(env[f'{PREFIX}_SKIP'])}"
    listed = _split(env.get(PREFIX, ""))
    if not patch.by_default and name not in listed and (not listed or "all" in listed):
        return None, f"not on by default: {PREFIX}=all,{name}"
    if listed:
        return name in listed or "all" in listed or None, f"{PREFIX}={cut(env[PREFIX])}"
    return True, "on by default"


def _listed(names: Names | None, known: Iterable[str], source: str) -> tuple[str, ...] | None:
    """Return the names in a list; raises UnknownPatch for an unknown one, or a text without any."""
    if names is None:
        return None
    if isinstance(names, bool):
        raise FlagError(f"{names} is not a list of patches' names")
    listed = (_split(names) or (names,)) if isinstance(names, str) else tuple(names)
    for name in listed:
        if name not in known:
            raise UnknownPatch(name, known, source, _SWITCHES.get(name.lower(), ""))
    return listed


def _split(text: str) -> tuple[str, ...]:
    """Split a list at commas, or at plus signs, since Slurm's `--export` cannot pass commas."""
    return tuple(part.strip() for part in text.replace("+", ",").split(",") if part.strip())


def _choice(
    env: Mapping[str, str], suffix: str, listed: Sequence[str], known: Sequence[str]
) -> str | None:
    """Return the value of a variable; raises FlagError, which lists choices, if it is unknown."""
    text = env.get(PREFIX + suffix)
    if text is None or text.lower() in known:
        return text and text.lower()
    raise FlagError(
        f"{PREFIX}{suffix} is {cut(text)!r}{nearest(text, known)}; "
        f"the choices are: {', '.join(listed)}"
    )
