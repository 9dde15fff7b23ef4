"""Declarations of a script: options, stock's verdicts, where patches cost more."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tests.harness import EAGER, Options

RIGHT, WRONG = "right", "wrong"
RAISES = "raises"
ALL_RIGHT = {1: RIGHT, 2: RIGHT, 3: RIGHT}
STEPS = 5

#: Why a patch calls more than the law allows, by stage, of several scripts.
GATHERED_AGAIN = {3: "zero3_retain releases a module after each of its calls in a backward"}
LOOKED_AT = dict.fromkeys((1, 2, 3), "weights_by_hand looks at weights and flags: 10 calls more")


def raises(words: str) -> str:
    """Stock's verdict: an exception with these words in it."""
    return f"{RAISES} {words!r}"


@dataclass(frozen=True)
class Script:
    """One training script and all that is said of it. It is called with a trainer."""

    train: Callable[..., None]
    stock: Mapping[int, str]  # verdict by ZeRO stage
    options: Options  # at any stage
    costs: Mapping[int, str] = field(default_factory=dict)  # why patches call more, by stage
    refusal: str = ""  # a pattern: what a patch may say in place of being right
    on: str = EAGER
    tolerance: float = 1e-6
    grouped: tuple[int, ...] = ()  # stages that run in two groups of two ranks, too
    warns: str = ""  # what patched is, with a warning: right, or as wrong as stock
    at_rest: bool = True  # no patch has a part in what stock gets right
    before: Callable[[Any], None] | None = None  # run the other way, in another process

    def __call__(self, trainer: Any, **arguments: Any) -> None:
        trainer.train(self.train, **arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """Ranks find it by its name."""
        return pkgutil.resolve_name, (f"{self.train.__module__}:{self.name}",)

    @property
    def name(self) -> str:
        return self.train.__name__

    __name__ = name  # as the id of a test case

    @property
    def theme(self) -> str:
        return self.train.__module__.rpartition(".")[2]

    @property
    def title(self) -> str:
        """The first line of its docstring."""
        return (self.train.__doc__ or "").strip().splitlines()[0]

    def at(self, stage: int, **changed: Any) -> Options:
        return replace(self.options, stage=stage, **changed)


def script(stock: Mapping[int, str], **more: Any) -> Callable[[Callable[[Any], None]], Script]:
    """Declare the function below it: stock's verdict by stage; more fields of Script, and Options.

    Patches have nothing to do in what stock gets right, and cost nothing, but for `at_rest=False`.
    """
    names = {field.name for field in fields(Script)}
    own = {name: more.pop(name) for name in names & more.keys()}
    options = Options(**{"steps": STEPS, **more})
    return lambda train: Script(train, stock, options, **own)


def scripts() -> list[Script]:
    """Every script of every file in this folder, in order."""
    import tests.scripts as folder

    declared: list[Script] = []
    for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        if "test_" in module.name or module.name.endswith((".conftest", ".page")):
            continue
        loaded = vars(importlib.import_module(module.name)).values()
        declared += [
            value
            for value in loaded
            if isinstance(value, Script) and value.train.__module__ == module.name
        ]
    return declared
