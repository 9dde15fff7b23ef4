"""Trainings as tests of a patch: a table of them, or one that is the test.

test_what_a_window_comes_to = checked(
    of("coalesce", windows.two_windows, 1, 2, 3, core={2}),
    *(of("coalesce", windows.window, 1, 2, **more) for more in (BF16, OFFLOADED)),
)

@trains("coalesce", at(1, 2, 3, core={2}), at(1, 2, **OFFLOADED))
def test_two_backwards_in_a_window(trainer: Any, step: int) -> None:
    ...
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest

from tests.harness.options import Options
from tests.harness.run import Outcome, Script, check
from tests.world import World


@dataclass(frozen=True)
class Case:
    """One training: a script, with these options, under these patches."""

    script: Script
    options: Options
    patches: tuple[str, ...]

    @property
    def name(self) -> str:
        """The function's name, with the arguments of a partial."""
        function = getattr(self.script, "func", self.script)
        keywords = getattr(self.script, "keywords", {}).items()
        return "-".join(
            [
                function.__name__,
                *(f"{name}={getattr(value, '__name__', value)}" for name, value in keywords),
            ]
        )

    @property
    def shows(self) -> dict[str, Any]:
        """The options by which quick cases are sampled."""
        return {"script": self.name, **self.options.shows, "stage": self.options.stage}

    def check(self, world: World, says: Sequence[str] | None = (), **more: Any) -> list[Outcome]:
        """says: words of each warning; None: of whichever."""
        outcomes = check(world, self.script, self.options, *self.patches, quiet=False, **more)
        for outcome in outcomes if says is not None else ():
            assert len(outcome.said) == len(says), outcome.said
            pairs = zip(says, outcome.said, strict=True)
            assert all(words in warning for words, warning in pairs), outcome.said
        return outcomes


def of(
    patches: str,
    script: Script,
    *stages: int,
    core: Container[int] = (),
    marks: Iterable[pytest.MarkDecorator] = (),
    **options: Any,
) -> list[Any]:
    """A script at these stages, for three steps: with options of its own, but for those given.

    core: the stages at which every release has it.
    """
    own = getattr(script, "options", Options())
    made = []
    for stage in stages:
        case = Case(script, own.at(stage, **{"steps": 3, **options}), tuple(patches.split()))
        name = "-".join([case.name, str(stage), *(str(value) for value in options.values())])
        own_marks = [*marks, *([pytest.mark.core_case] if stage in core else [])]
        made.append(pytest.param(case, id=name, marks=own_marks))
    return made


def cases(*rows: Iterable[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [*chain.from_iterable(rows)])


def checked(*rows: Iterable[Any], says: Sequence[str] | None = ()) -> Any:
    """A test: each of these trainings ends where plain PyTorch does."""

    @cases(*rows)
    def test(world: World, case: Case) -> None:
        case.check(world, says)

    return test


STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
Row = Callable[[str, Script], list[Any]]


def at(*stages: int, **options: Any) -> Row:
    """A row of `trains`: what `of` is told, but for the patches and the script."""
    return lambda patches, script: of(patches, script, *stages, **options)


def trains(patches: str, *rows: Row, says: Sequence[str] | None = ()) -> Callable[[Script], Any]:
    """The function below ends where plain PyTorch does, with each of these options."""

    def decorate(train: Script) -> Any:
        test = checked(*(row(patches, train) for row in rows), says=says)
        test.__name__, test.__doc__ = train.__name__, train.__doc__
        test.script = train
        train.__qualname__ += ".script"  # where ranks find it
        return test

    return decorate
