"""The table of docs/frameworks.md: python -m tests.frameworks [DEEPSPEED_RELEASE].

How far stock and patched end from one process without DeepSpeed, as a part of all that it learned,
and the gradient reductions of a step.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ds_patches.startup import variables
from tests.frameworks import runs, saved
from tests.frameworks.runs import part_lost
from tests.frameworks.user import accelerated, engines
from tests.releases.run import environment
from tests.training.trainers import Parameters
from tests.world import World

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@dataclass(frozen=True)
class Row:
    """A script with and without DeepSpeed.

    given, without: what it gets with and without; and other arguments without, `alone`, if any.
    unset: settings that the framework wants to choose.
    """

    title: str
    script: str
    arguments: tuple[Any, ...]
    start: Callable[[], Parameters]
    given: dict[str, Any] = field(default_factory=dict)
    without: dict[str, Any] = field(default_factory=dict)
    alone: tuple[Any, ...] = ()
    batch: int | str = "auto"
    steps: int = 4
    zero: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = (2, 3)
    unset: tuple[str, ...] = ()

    def config(self, stage: int) -> dict[str, Any]:
        sizes = {"train_micro_batch_size_per_gpu": self.batch}
        if self.batch != "auto":
            sizes["gradient_accumulation_steps"] = self.given.get("micro_steps", 1)
        whole = runs.automatic(stage, **self.zero) | sizes
        return {name: value for name, value in whole.items() if name not in self.unset}


def named(seed: int, build: Callable[[], torch.nn.Module], prefix: str = "") -> Parameters:
    torch.manual_seed(seed)
    return {prefix + name: param.detach() for name, param in build().named_parameters()}


def rows(folder: Path) -> Iterator[Row]:
    causal, embedder = saved.save_causal(folder / "lm"), saved.save_embedder(folder / "embedder")
    lm, sentences = (folder / "lm", folder / "out"), (folder / "embedder", folder / "out")
    four = {"given": {"micro_steps": 4}, "without": {"micro_steps": 8}}
    two = {"given": {"micro_steps": 1}, "without": {"micro_steps": 2}}
    heads = {"start": lambda: named(accelerated.SEED, accelerated.TwoHeads), "batch": 4}
    yield Row("Trainer, 4 micro steps", "hf_trainer", lm, lambda: causal, **four)
    yield Row("the same, offload", "hf_trainer", lm, lambda: causal, **four, zero=OFFLOAD)
    yield Row("sentence-transformers, cached loss", "sentences", sentences, lambda: embedder, **two)
    yield Row(
        "Accelerate, `accumulate()`", "accelerated", ("accumulation",), **heads, **four, steps=2
    )
    by_engine = {"arguments": ("two_losses_of_engine",), "alone": ("two_losses",)}
    title = "Accelerate, two losses, `no_sync()` of the engine"
    yield Row(title, "accelerated", **by_engine, **heads, **two, steps=8)
    yield Row(
        "Lightning, two losses",
        "lit",
        (folder,),
        lambda: named(accelerated.SEED, accelerated.TwoHeads, "net."),
        batch=4,
        steps=8,
        unset=("gradient_accumulation_steps", "gradient_clipping"),
    )
    layers = {"batch": engines.BATCH, "steps": 3, "stages": (1, 2, 3)}
    cached = ("cached_gradients",)
    yield Row("GradCache's loop", "engines", cached, lambda: named(9, encoder), **layers)
    gan = ("adversaries",)
    yield Row("a GAN", "engines", gan, lambda: named(8, encoder), **layers)
    yield Row(
        "a GAN, frozen critic",
        "engines",
        gan,
        lambda: named(8, encoder),
        {"freezes": True},
        **layers,
    )


def encoder() -> torch.nn.Module:
    return engines.two_layers(engines.WIDTH)


def cells(found: runs.Run, reference: runs.Run, row: Row) -> str:
    if found.error:
        return f"{' '.join(found.error.split())[:60]} | -"
    lost = part_lost(found, reference, row.start())
    return f"{lost:.2g} | {found.reductions / row.steps:g}"


def main(release: str | None) -> None:
    outside = environment(release) if release else dict(os.environ)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        alone = stack.enter_context(World(1))
        stock = stack.enter_context(World(variables=outside))
        patched = stack.enter_context(World(variables=outside | variables.of_program(outside)))
        print("| script | stage | stock | reductions | patched | reductions |")
        print("|---|---|---|---|---|---|")
        for row in rows(folder):
            reference = one_run(
                alone, row, *(row.alone or row.arguments), **row.without or row.given
            )
            assert not reference.error, reference.error
            for stage in row.stages:
                arguments = (*row.arguments, row.config(stage))
                found = [one_run(world, row, *arguments, **row.given) for world in (stock, patched)]
                told = " | ".join(cells(one, reference, row) for one in found)
                print(f"| {row.title} | {stage} | {told} |", flush=True)


def one_run(world: World, row: Row, *arguments: Any, **options: Any) -> runs.Run:
    """On rank 0, and of several engines the first."""
    found: runs.Run = world.run(runs.script, row.script, *arguments, **options)[0]
    first = {name: p for name, p in found.parameters.items() if name.startswith("0.")}
    return replace(found, parameters=first)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [None]))
