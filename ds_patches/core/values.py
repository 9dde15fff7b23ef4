"""What flags are made of: words of a list, switches, choices of an option, seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds_patches.core.errors import FlagError, nearest
from ds_patches.core.patch import ALL, Option

YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

#: Of an option; a sequence where it takes several choices, a number or a bool where one means it.
Value = Sequence[str] | str | int


def split(text: str) -> tuple[str, ...]:
    """Split a list at commas, or at plus signs: Slurm's `--export` takes commas for itself."""
    return tuple(part.strip() for part in text.replace("+", ",").split(",") if part.strip())


def switch(where: str, text: str, others: Sequence[str] = ()) -> bool:
    """Return yes or no; a list of `others` is a yes. Raises FlagError for any other text."""
    if text.lower() not in YES + NO and not _is_made_of(others, split(text)):
        raise no_choice(where, text, ("0", "1", *others), also=YES + NO)
    return text.lower() not in NO


def choice(option: Option, value: Value) -> str | None:
    """Return what the option is with this value, in its one spelling; None if that is no choice."""
    if isinstance(value, int):
        value = str(value)
    if option.several:
        words = split(value) if isinstance(value, str) else value
        if not _is_made_of(option.words, words):
            return None
        return ",".join(one for one in option.choices if one in words or ALL in words)
    if not isinstance(value, str):
        return None
    if value.lower() in YES + NO and {"on", "off"} <= {*option.choices}:
        return "on" if value.lower() in YES else "off"
    return value if value in option.choices else None


def seconds(text: str) -> float:
    """Return a span of time. Raises ValueError for what is none, as nan and inf are."""
    if not 0 <= (number := float(text)) < float("inf"):
        raise ValueError(text)
    return number


def no_choice(
    where: str, value: object, choices: Iterable[str], also: Iterable[str] = ()
) -> FlagError:
    """Return the error for a value that is none of the choices, nor of their other spellings."""
    choices = tuple(choices)
    valid = (*choices, *also)
    words = split(value) if isinstance(value, str) else ()
    wrong = next((word for word in words if word not in valid), "")
    guess = nearest(wrong, valid)
    return FlagError(f"{where} is {value!r}{guess}; the choices are: {', '.join(choices)}")


def _is_made_of(words: Sequence[str], some: object) -> bool:
    """Anything may come from a call: a dict, None."""
    return isinstance(some, Sequence) and bool(some) and all(one in words for one in some)
