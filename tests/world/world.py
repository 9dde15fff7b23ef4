"""The `world` fixture's object: runs cases on ranks that outlive the test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from tests.world.ranks import Ranks

__tracebackhide__ = True

CASE_SECONDS = 120.0


@dataclass(eq=False)
class World:
    """`size` ranks, started by the first case, replaced after one that failed; a block ends them.

    accelerator: DeepSpeed's name of what they run on; "cuda" takes a GPU for each, or one for all.
    variables: the ranks' interpreters start with these beside pytest's own.
    """

    size: int = 2
    accelerator: str = "cpu"
    variables: Mapping[str, str] = field(default_factory=dict)
    seconds: float = CASE_SECONDS
    _ranks: list[Ranks] = field(default_factory=list, init=False)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def run(self, case: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `case(*args, **kwargs)` on every rank; its return values in rank order.

        The ranks import it, so it is a top-level function of a module.

        Raises RankError when a rank raised or died, WorldTimeout when `seconds` passed.
        """
        call = (f"{case.__module__}:{case.__qualname__}", args, kwargs)
        # Taken off for the time of the call: ranks that failed a case are ended, and the next
        # case finds none and starts new ones.
        ranks = self._ranks.pop() if self._ranks else Ranks(self)
        results = ranks.run(call, self.seconds)
        self._ranks.append(ranks)
        return results

    def within(self, seconds: float) -> World:
        """The same ranks with another deadline: `world.within(30).run(case)`."""
        view = copy(self)
        view.seconds = seconds
        return view

    def close(self) -> None:
        while self._ranks:
            self._ranks.pop().leave()


def on_ranks(test: Callable[..., None]) -> Callable[..., None]:
    """The test runs on every rank of `world`: there it is called without one."""

    @functools.wraps(test)
    def run(world: World | None = None, **arguments: Any) -> None:
        if world is None:
            test(**arguments)
        else:
            world.run(run, **arguments)

    signature = inspect.signature(test)
    own = inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), own])  # type: ignore[attr-defined]
    return run
