"""What a script says of itself: settings, what stock comes to, what is yet to be mended."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

RIGHT, WRONG = "right", "wrong"
RAISES = "raises"
ALL_RIGHT = {1: RIGHT, 2: RIGHT, 3: RIGHT}

#: Who mends what is marked.
TOPICS = ("core", "accumulation", "dc_fallback", "stream_safety", "frameworks")

#: A step of ZeRO-1/2 takes some 70 calls more, whatever the model; these models are small.
WRAPPED = "accumulation"

#: How a script is run: by an engine on the CPU, under the stand-in of DeepCompile, or on the
#: streams of the race detector.
EAGER, DEEPCOMPILE, STREAMS = "eager", "deepcompile", "streams"

Awaits = Mapping[str, str]


def raises(words: str) -> str:
    """Stock's verdict: an exception with these words in it."""
    return f"{RAISES} {words!r}"


@dataclass(frozen=True)
class Script:
    """One training script and all that is said of it."""

    run: Callable[[Any], None]
    stock: Mapping[int, str]  # verdict by ZeRO stage
    awaits: Mapping[int, Awaits] = field(default_factory=dict)  # topic by property, by stage
    refusal: str = ""  # a pattern: what a patch may say in place of being right
    model: str = "TwoHeads"
    on: str = EAGER
    micro_steps: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    muon: bool = False  # in place of SGD
    tolerance: float = 1e-6
    quick: tuple[int, ...] = ()  # stages that run in every test run
    grouped: tuple[int, ...] = ()  # stages that run in two groups of two ranks, too
    at_rest: bool = True  # no patch has a part in what stock gets right
    before: Callable[[Any], None] | None = None  # run the other way, in another process

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def theme(self) -> str:
        return self.run.__module__.rpartition(".")[2]

    @property
    def title(self) -> str:
        """The first line of its docstring."""
        return (self.run.__doc__ or "").strip().splitlines()[0]

    @property
    def reference(self) -> str:
        """How a rank finds it."""
        return f"{self.run.__module__}:{self.name}"


def script(
    stock: Mapping[int, str],
    *,
    awaits: Mapping[int, Awaits] | None = None,
    quick: tuple[int, ...] | None = None,
    at_rest: bool = True,
    **said: Any,
) -> Callable[[Callable[[Any], None]], Script]:
    """Declare the function below it.

    stock: verdict by stage. awaits: topic by property, by stage. quick: without it, the highest
    stage. at_rest: patches have nothing to do in what stock gets right, and cost what they cost.
    """
    by_stage = {stage: dict((awaits or {}).get(stage, {})) for stage in stock}
    if at_rest and said.get("on") != STREAMS:  # whose steps are longer
        for stage in (1, 2):
            if stock.get(stage) == RIGHT:
                by_stage[stage]["calls"] = WRAPPED

    def declare(run: Callable[[Any], None]) -> Script:
        return Script(
            run,
            stock,
            awaits=by_stage,
            at_rest=at_rest,
            quick=(max(stock),) if quick is None else quick,
            **said,
        )

    return declare


def scripts() -> list[Script]:
    """Every script of every file in this folder, in order."""
    import tests.scripts as folder

    found: list[Script] = []
    for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        if "test_" in module.name or module.name.endswith((".conftest", ".page")):
            continue
        loaded = vars(importlib.import_module(module.name)).values()
        found += [
            one for one in loaded if isinstance(one, Script) and one.run.__module__ == module.name
        ]
    return found


def find(reference: str) -> Script:
    module, _, name = reference.partition(":")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, Script), reference
    return found
