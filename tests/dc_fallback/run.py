"""A pattern trained under DeepCompile, with the patch, and by plain PyTorch, held together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.dc_fallback import patterns, stand_in
from tests.dc_fallback.patterns import inputs
from tests.training.options import Options
from tests.training.run import Outcome, applied, measure
from tests.training.surroundings import DEEPCOMPILE
from tests.training.trainers import EngineTrainer
from tests.world import World

EXACT = 2e-6
patched = partial(applied, "dc_fallback")
Script = Callable[[Any], None]


class Trainer(EngineTrainer):
    """Also looks at what has been compiled: so far, after each step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.graphs: list[int] = []

    def step(self) -> None:
        super().step()
        self.graphs.append(stand_in.native.compiled)


def loop(trainer: Any, *, forwards: int = 1, evaluates: bool = False) -> None:
    """`forwards`: how many come before one backward over their sum.

    evaluates: a forward without gradients comes before, and one that no backward follows.
    """
    for step in trainer.steps():
        for micro in range(trainer.options.micro_steps):
            if evaluates:
                with torch.no_grad():
                    trainer(*inputs(step, 7))
                trainer(*inputs(step, 8))
            losses = [trainer(*inputs(step, 3 * micro + part)) for part in range(forwards)]
            trainer.backward(sum(losses[1:], losses[0]))
            trainer.step()


def run(
    pattern: str, script: Script = loop, compiles: dict[str, Any] | None = None, **options: Any
) -> tuple[Outcome, list[int]]:
    """What became of it, and how many graphs there were after each step. Runs on every rank.

    compiles: of `stand_in.deep_compile`; or ``whole``: nothing of the model is compiled, as on a
    release whose graphs this torch cannot trace.
    """
    given = dict(compiles or {})
    made: list[Trainer] = []

    class Kept(Trainer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    with skipped_whole(pattern) if given.pop("whole", False) else nullcontext():
        outcome = measure(
            script,
            Options(model=f"patterns.{pattern}", **options),
            patched(),
            on=DEEPCOMPILE,
            compiles=given,
            engine=Kept,
        )
    outcome.tolerance = EXACT
    return outcome, made[0].graphs if made else []


@contextmanager
def skipped_whole(pattern: str) -> Iterator[None]:
    """This pattern's whole forward runs eagerly."""
    kind: type[nn.Module] = patterns.BY_NAME[pattern]
    patterns.BY_NAME[pattern] = patterns.skipping(kind)
    try:
        yield
    finally:
        patterns.BY_NAME[pattern] = kind


def trains(
    world: World, pattern: str, script: Script = loop, compiles: Any = None, **options: Any
) -> tuple[Outcome, list[int]]:
    """As plain PyTorch does, every parameter, and nothing stays gathered."""
    found = world.run(run, pattern, script, compiles, **options)
    for outcome, _ in found:
        assert not outcome.untrained, outcome
        assert outcome.equal, outcome
        assert not any(outcome.available), "a parameter stayed gathered"
    first: tuple[Outcome, list[int]] = found[0]
    return first
