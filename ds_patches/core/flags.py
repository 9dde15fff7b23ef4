"""What the user wants: call arguments before per-patch variables before lists before defaults."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ds_patches.core import log, values
from ds_patches.core.errors import FlagError, UnknownPatch, nearest
from ds_patches.core.gate import Force
from ds_patches.core.patch import Option, Patch
from ds_patches.core.values import Value

PREFIX = "DS_PATCHES"
_GENERAL = ("", "_SKIP", "_STRICT", "_FORCE", "_LOG", "_RANK_TIMEOUT", "_PREFIX", "_STATUS_FILE")
#: Seconds. Ranks leave the last collective of an engine's construction together.
RANK_TIMEOUT = 120.0
#: The variables that are lists of patches, and what else may stand in them.
_LISTS = {"": ("all", "none"), "_SKIP": (), "_FORCE": ("all",)}

#: Of patches; a text is split at commas.
Names = Iterable[str] | str
Options = Mapping[str, Mapping[str, Value]]


@dataclass(frozen=True)
class Request:
    """What the user wants of one patch. `why` names the flag that decided.

    for_others: it is wanted only because another one requires it.
    """

    wanted: bool
    why: str
    force: Force
    options: Mapping[str, str]
    for_others: bool = False


@dataclass(frozen=True)
class Requests:
    """All flags, read and checked."""

    strict: bool
    of: Mapping[str, Request]


def read(
    patches: Mapping[str, Patch],
    *,
    only: Names | None = None,
    skip: Names | None = None,
    strict: bool | None = None,
    force: Names | None = None,
    options: Options | None = None,
) -> Requests:
    """Merge the arguments of a call with the environment.

    Raises UnknownPatch or FlagError for anything that means nothing, listing what does.
    """
    env = _environment(patches)
    only, skip, force = _listed(only), _listed(skip), _listed(force) or ()
    for argument, names in (("only", only), ("skip", skip), ("force", force), ("options", options)):
        _must_be_known(names or (), patches, argument, ("all",) if argument == "force" else ())
    wishes = {name: _wish(name, only, skip, env, patches) for name in patches}
    requests = {}
    for name, patch in patches.items():
        wanted, why = _with_required(name, wishes, patches)
        asked = (options or {}).get(name, {})
        requests[name] = Request(
            wanted,
            why,
            _force(name, force, env),
            _options(patch, asked, env),
            for_others=wanted and not wishes[name].wanted,
        )
    if strict is None:
        strict = values.switch(f"{PREFIX}_STRICT", env.get(f"{PREFIX}_STRICT", "0"))
    level = env.get(f"{PREFIX}_LOG")
    if level is not None and level.lower() not in log.LEVELS:
        raise values.no_choice(f"{PREFIX}_LOG", level, log.LEVELS)
    log.say(level)
    rank_timeout()
    return Requests(strict, requests)


def defaults(patch: Patch) -> Mapping[str, str]:
    """Return what the options are where nobody chooses."""
    return _options(patch, {}, {})


def is_ours(variable: str) -> bool:
    """Whether an environment variable is meant for this package, known or not."""
    return variable == PREFIX or variable.startswith(f"{PREFIX}_")


def variables(patches: Mapping[str, Patch]) -> list[str]:
    """Return the names of all environment variables that mean something."""
    names = [PREFIX + suffix for suffix in _GENERAL]
    for patch in patches.values():
        names.append(_variable(patch))
        names.extend(_variable(patch, option) for option in patch.options)
    return names


def is_strict() -> bool:
    """Whether the environment asks for strictness, whatever else in it means nothing."""
    return os.environ.get(f"{PREFIX}_STRICT", "").strip().lower() in values.YES


def rank_timeout() -> float:
    """Return how many seconds a rank waits for the others to say what is applied there."""
    text = os.environ.get(f"{PREFIX}_RANK_TIMEOUT") or str(RANK_TIMEOUT)
    try:
        return values.seconds(text)
    except ValueError:
        raise FlagError(f"{PREFIX}_RANK_TIMEOUT is {text!r}, not a number of seconds") from None


def _environment(patches: Mapping[str, Patch]) -> dict[str, str]:
    """Return our variables; raises for one that means nothing, since a typo would be silent.

    An empty one is left out: it means the same as an unset one.
    """
    env = {k: v.strip() for k, v in os.environ.items() if is_ours(k) and v}
    valid = variables(patches)
    # Nobody knows the options of a patch that cannot be loaded.
    broken = tuple(f"{_variable(patch)}_" for patch in patches.values() if patch.broken)
    for name in env:
        if name not in valid and not name.startswith(broken):
            guess = nearest(name, valid, PREFIX)
            raise FlagError(f"{name} means nothing{guess}; the variables are: {', '.join(valid)}")
    for suffix, words in _LISTS.items():
        variable = PREFIX + suffix
        _must_be_known(_listed(env.get(variable)) or (), patches, variable, words)
    listed = {*values.split(env.get(PREFIX, ""))}
    if len(listed) > 1 and listed & {"all", "none"}:
        raise FlagError(f"{PREFIX} is {env[PREFIX]!r}: all and none stand alone")
    return env


class _Wish(NamedTuple):
    """wanted: None where nothing is said of the patch by name, and it is not on a list."""

    wanted: bool | None
    why: str


def _with_required(
    name: str, wishes: Mapping[str, _Wish], patches: Mapping[str, Patch]
) -> tuple[bool, str]:
    """What a wanted patch requires is wanted too. Where that is left out by name, so are both."""
    wanted, why = wishes[name]
    for required in patches[name].requires if wanted else ():
        if wishes[required].wanted is False:
            return False, f"needs {required}, which is left out: {wishes[required].why}"
    if wanted is None:
        for other, patch in patches.items():
            if name in patch.requires and _with_required(other, wishes, patches)[0]:
                return True, f"required by {other}"
    return bool(wanted), why


def _wish(
    name: str,
    only: tuple[str, ...] | None,
    skip: tuple[str, ...] | None,
    env: Mapping[str, str],
    patches: Mapping[str, Patch],
) -> _Wish:
    if name in (skip or ()):
        return _Wish(False, "skipped by the call")
    if only is not None:
        return _Wish(name in only or None, "the call's choice")
    variable = _variable(patches[name])
    if variable in env:
        value = env[variable]
        if patches[name].broken:  # its options are not known
            return _Wish(value.lower() not in values.NO, f"{variable}={value}")
        words = next((one.words for one in patches[name].options if one.several), ())
        return _Wish(values.switch(variable, value, words), f"{variable}={value}")
    if name in values.split(env.get(f"{PREFIX}_SKIP", "")):
        return _Wish(False, f"{PREFIX}_SKIP={env[f'{PREFIX}_SKIP']}")
    if listed := values.split(env.get(PREFIX, "")):
        return _Wish(name in listed or "all" in listed or None, f"{PREFIX}={env[PREFIX]}")
    return _Wish(True, "on by default")


def _force(name: str, force: tuple[str, ...], env: Mapping[str, str]) -> Force:
    asked = (*force, *values.split(env.get(f"{PREFIX}_FORCE", "")))
    return Force.SHAPE if name in asked else Force.VERSION if "all" in asked else Force.NO


def _options(patch: Patch, asked: Mapping[str, Value], env: Mapping[str, str]) -> dict[str, str]:
    known = {option.name: option for option in patch.options}
    for name in asked if not patch.broken else ():
        if name not in known:
            guess, valid = nearest(name, known), ", ".join(known) or "(none)"
            raise FlagError(f"{patch.name} has no option {name!r}{guess}; its options are: {valid}")
    chosen = {}
    for name, option in known.items():
        variable = _variable(patch, option)
        where = f"{patch.name}({name}=...)" if name in asked else variable
        # The variable of the patch itself makes no choice where it is a mere 0 or 1.
        short = values.choice(option, env.get(_variable(patch), "")) if option.several else None
        value = asked.get(name, env.get(variable, short or option.default))
        if (choice := values.choice(option, value)) is None:
            raise values.no_choice(where, value, option.words)
        chosen[name] = choice
    return chosen


def _variable(patch: Patch, option: Option | None = None) -> str:
    words = [PREFIX, patch.name.replace(".", "_"), *([option.name] if option else [])]
    return "_".join(words).upper()


def _must_be_known(
    names: Iterable[str], patches: Mapping[str, Patch], where: str, words: tuple[str, ...]
) -> None:
    for name in names:
        if name not in patches and name not in words:
            raise UnknownPatch(name, patches, where)


def _listed(names: Names | None) -> tuple[str, ...] | None:
    if isinstance(names, str):
        return values.split(names) or (names,)  # no name at all is an error, like a wrong one
    return None if names is None else tuple(names)
