"""A pattern trained by an engine under DeepCompile and by plain PyTorch, held together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.dc_fallback import patterns, stand_in
from tests.listening import listening
from tests.training import trainers
from tests.training.run import applied

EXACT = 2e-6


@dataclass
class Outcome:
    """What became of an engine."""

    difference: float = float("inf")
    where: str = ""
    moved: float = 0.0
    error: str = ""
    untrained: list[str] = field(default_factory=list)  # moved in the reference, and not here
    available: list[list[str]] = field(default_factory=list)  # after each backward
    graphs: list[int] = field(default_factory=list)  # compiled so far, after each step
    heard: list[str] = field(default_factory=list)  # what the patch logged

    @property
    def equal(self) -> bool:
        return not self.error and self.moved > 1e-3 and self.difference <= EXACT


class Trainer(trainers.EngineTrainer):
    """Also looks at what has been compiled."""

    def __init__(self, engine: Any, style: str = "engine") -> None:
        super().__init__(engine, style)
        self.graphs: list[int] = []

    def step(self) -> None:
        super().step()
        self.graphs.append(stand_in.native.compiled)


Script = Callable[[Any], None]


def inputs(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's tokens and targets, on the device that it trains on."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().current_device_name()
    tokens, targets = patterns.batch(step, part, dist.get_rank())
    return tokens.to(device), targets.to(device)


def steps(
    trainer: Any,
    *,
    steps: int = 3,
    micro_steps: int = 1,
    forwards: int = 1,
    evaluates: bool = False,
) -> None:
    """`forwards`: how many come before one backward over their sum.

    evaluates: a forward without gradients comes before, and one that no backward follows.
    """
    for step in range(steps):
        for micro in range(micro_steps):
            if evaluates:
                with torch.no_grad():
                    trainer(*inputs(step, 7))
                trainer(*inputs(step, 8))
            losses = [trainer(*inputs(step, 3 * micro + part)) for part in range(forwards)]
            trainer.backward(sum(losses[1:], losses[0]))
            trainer.step()


patched = partial(applied, "dc_fallback")


def engine_of(start: torch.nn.Module, settings: dict[str, Any], backend: str = "eager") -> Any:
    """An engine under DeepCompile."""
    engine = trainers.build_engine(deepcopy(start), {**settings, "compile": {"deepcompile": True}})
    engine.compile(backend=backend)
    return engine


def run(
    pattern: str,
    script: Script = steps,
    *,
    style: str = "engine",
    micro_steps: int = 1,
    patch: bool = True,
    whole: bool = False,
    keeps: bool = False,
    anew: bool = False,
    settings: dict[str, Any] | None = None,
) -> Outcome:
    """`script`, by an engine and by plain PyTorch, from the same start. Runs on every rank.

    anew: DeepCompile compiles all again in the second step, as it does after its warm-up.
    keeps: graphs keep parameters gathered until the step, as DeepCompile's selective_gather does.
    whole: nothing of the model is compiled, as on a release whose graphs this torch cannot trace.
    """
    start = patterns.build(pattern)
    if whole:
        patterns.skip_whole(start)
    expected = trainers.plain(start, script, micro_steps)
    origin = {name: p.detach().clone() for name, p in start.named_parameters()}
    with (
        stand_in.deep_compile() as native,
        patched() if patch else nullcontext(),
        listening() as heard,
    ):
        wanted = trainers.config(3, micro_steps=micro_steps, **(settings or {}))
        trainer = Trainer(engine_of(start, wanted), style)
        native.keeps = keeps
        native.begins_anew = {1} if anew else set()
        outcome = Outcome(
            available=trainer.available_after_backward, graphs=trainer.graphs, heard=heard
        )
        trainers.run_into(outcome, script, trainer, expected, origin)
        if not outcome.error:
            outcome.untrained = untrained(trainer.parameters(), expected, origin)
        return outcome


def untrained(found: Any, expected: Any, origin: Any) -> list[str]:
    """Names of parameters that should have moved and did not, or only by rounding."""
    return [
        name
        for name, start in origin.items()
        if (found[name] - start).norm() < 0.1 * (expected[name] - start).norm()
    ]


def train(
    pattern: str,
    *,
    forwards: int = 1,
    micro_steps: int = 1,
    evaluates: bool = False,
    **case: Any,
) -> Outcome:
    """Three steps of `pattern`."""
    script = partial(steps, forwards=forwards, micro_steps=micro_steps, evaluates=evaluates)
    return run(pattern, script, micro_steps=micro_steps, **case)
