"""What the user wants: call arguments before per-patch variables before lists before defaults."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_patches.core import log
from ds_patches.core.errors import FlagError, UnknownPatch
from ds_patches.core.gate import Force
from ds_patches.core.patch import ALL, Option, Patch

PREFIX = "DS_PATCHES"
_GENERAL = ("", "_SKIP", "_STRICT", "_FORCE", "_LOG", "_RANK_TIMEOUT", "_PREFIX")
#: Seconds. Ranks leave the last collective of an engine's construction together.
RANK_TIMEOUT = 120.0
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")

Names = Iterable[str] | str
#: Of an option; a sequence where it takes several choices.
Value = Sequence[str] | str
Options = Mapping[str, Mapping[str, Value]]


@dataclass(frozen=True)
class Wish:
    """What the user wants of one patch. `why` names the flag that decided."""

    wanted: bool
    why: str
    force: Force
    options: Mapping[str, str]


@dataclass(frozen=True)
class Wishes:
    """All flags, read and checked."""

    strict: bool
    of: Mapping[str, Wish]


def read(
    patches: Mapping[str, Patch],
    *,
    only: Names | None = None,
    skip: Names | None = None,
    strict: bool | None = None,
    force: Names | None = None,
    options: Options | None = None,
) -> Wishes:
    """Merge the arguments of a call with the environment.

    Raises UnknownPatch or FlagError for anything that means nothing, listing what does.
    """
    env = _environment(patches)
    only, skip, force = _listed(only), _listed(skip), _listed(force) or ()
    for argument, names in (("only", only), ("skip", skip), ("force", force), ("options", options)):
        _must_be_known(names or (), patches, argument, ("all",) if argument == "force" else ())
    wishes = {}
    for name, patch in patches.items():
        wanted, why = _wanted(name, only, skip, env, patches)
        asked = (options or {}).get(name, {})
        wishes[name] = Wish(wanted, why, _force(name, force, env), _options(patch, asked, env))
    if strict is None:
        strict = _switch(f"{PREFIX}_STRICT", env.get(f"{PREFIX}_STRICT", "0"))
    _say(env.get(f"{PREFIX}_LOG"))
    rank_timeout()
    return Wishes(strict, wishes)


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
    return os.environ.get(f"{PREFIX}_STRICT", "").strip().lower() in _YES


def rank_timeout() -> float:
    """Return how many seconds a rank waits for the others to say what is applied there."""
    text = os.environ.get(f"{PREFIX}_RANK_TIMEOUT", str(RANK_TIMEOUT))
    try:
        return float(text)
    except ValueError:
        raise FlagError(f"{PREFIX}_RANK_TIMEOUT is {text!r}, not a number of seconds") from None


def _environment(patches: Mapping[str, Patch]) -> dict[str, str]:
    """Return our variables; raises for one that means nothing, since a typo would be silent."""
    env = {k: v.strip() for k, v in os.environ.items() if is_ours(k)}
    valid = variables(patches)
    for name in env:
        if name not in valid:
            raise FlagError(f"{name} means nothing; the variables are: {', '.join(valid)}")
    for suffix in ("", "_SKIP", "_FORCE"):
        words = ("all", "none") if suffix == "" else ("all",) if suffix == "_FORCE" else ()
        _must_be_known(_split(env.get(PREFIX + suffix, "")), patches, PREFIX + suffix, words)
    return env


def _wanted(
    name: str,
    only: tuple[str, ...] | None,
    skip: tuple[str, ...] | None,
    env: Mapping[str, str],
    patches: Mapping[str, Patch],
) -> tuple[bool, str]:
    if name in (skip or ()):
        return False, "skipped by the call"
    if only is not None:
        return name in only, "the call's choice"
    variable = _variable(patches[name])
    if variable in env:
        value, first = env[variable], _first(patches[name])
        chosen = first and _chosen(first, value)
        wanted = bool(chosen) or _switch(variable, value, first.words if first else ())
        return wanted, f"{variable}={value}"
    if name in _split(env.get(f"{PREFIX}_SKIP", "")):
        return False, f"{PREFIX}_SKIP={env[f'{PREFIX}_SKIP']}"
    if listed := _split(env.get(PREFIX, "")):
        return name in listed or "all" in listed, f"{PREFIX}={env[PREFIX]}"
    return True, "on by default"


def _force(name: str, force: tuple[str, ...], env: Mapping[str, str]) -> Force:
    asked = (*force, *_split(env.get(f"{PREFIX}_FORCE", "")))
    return Force.SHAPE if name in asked else Force.VERSION if "all" in asked else Force.NO


def _options(patch: Patch, asked: Mapping[str, Value], env: Mapping[str, str]) -> dict[str, str]:
    known = {option.name: option for option in patch.options}
    for name in asked:
        if name not in known:
            valid = ", ".join(known) or "(none)"
            raise FlagError(f"{patch.name} has no option {name!r}; its options are: {valid}")
    chosen = {}
    for name, option in known.items():
        variable = _variable(patch, option)
        where = f"{patch.name}({name}=...)" if name in asked else variable
        # The variable of the patch itself makes no choice where it is a mere 0 or 1.
        short = _chosen(option, env.get(_variable(patch), "")) if option.first else None
        value = asked.get(name, env.get(variable, short or option.default))
        if (choice := _chosen(option, value)) is None:
            valid = ", ".join(option.words)
            raise FlagError(f"{where} is {value!r}; the choices are: {valid}")
        chosen[name] = choice
    return chosen


def _first(patch: Patch) -> Option | None:
    return next((option for option in patch.options if option.first), None)


def _chosen(option: Option, value: Value) -> str | None:
    """Return what the option is with this value, in its one spelling; None if that is no choice."""
    if not option.several:
        return value if isinstance(value, str) and value in option.choices else None
    if isinstance(value, str):
        value = _split(value)
    elif not isinstance(value, Sequence):
        return None  # True, or a dict: anything may come from a call
    words = tuple(value)
    if not words or not all(word in option.words for word in words):
        return None
    return ",".join(choice for choice in option.choices if choice in words or ALL in words)


def _variable(patch: Patch, option: Option | None = None) -> str:
    return "_".join([PREFIX, patch.name, *([option.name] if option else [])]).upper()


def _must_be_known(
    names: Iterable[str], patches: Mapping[str, Patch], where: str, words: tuple[str, ...]
) -> None:
    for name in names:
        if name not in patches and name not in words:
            raise UnknownPatch(name, patches, where)


def _listed(names: Names | None) -> tuple[str, ...] | None:
    return (names,) if isinstance(names, str) else None if names is None else tuple(names)


def _split(text: str) -> tuple[str, ...]:
    """Split a list at commas, or at plus signs: Slurm's `--export` takes commas for itself."""
    return tuple(part.strip() for part in text.replace("+", ",").split(",") if part.strip())


def _switch(variable: str, value: str, others: tuple[str, ...] = ()) -> bool:
    if value.lower() not in _YES + _NO:
        raise FlagError(
            f"{variable} is {value!r}; the choices are: {', '.join(('0', '1', *others))}"
        )
    return value.lower() in _YES


def _say(level: str | None) -> None:
    if level is not None and level.lower() not in log.LEVELS:
        raise FlagError(f"{PREFIX}_LOG is {level!r}; the choices are: {', '.join(log.LEVELS)}")
    log.say(level)
