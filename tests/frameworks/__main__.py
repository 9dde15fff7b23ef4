"""The tables of docs/frameworks.md: python -m tests.frameworks [DEEPSPEED_RELEASE].

How far stock and patched end from one process without DeepSpeed, as a part of all that it learned,
and the gradient reductions of a step. Of an environment with other packages it tells
these.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from ds_patches.startup import variables
from tests.frameworks.runs import Run, automatic, on_two, part_lost
from tests.frameworks.trainings import TRAININGS, Training, causal
from tests.releases.run import environment
from tests.training.trainers import Parameters
from tests.world import World

PACKAGES = ("transformers", "accelerate", "sentence-transformers", "datasets", "peft", "trl")


def cells(found: Run, reference: Run, start: Parameters, training: Training) -> str:
    if found.error:
        return f"{' '.join(found.error.split())[:60]} | -"
    lost = part_lost(found, reference, start)
    return f"{lost:.2g} | {found.reductions / training.steps:g}"


def generating(folder: Path, stock: World, patched: World) -> str:
    """The row of GRPO, of which there is no other run of one process with the same answers."""
    causal(folder)
    arguments = ("preferences", "grpo", folder / "lm", folder / "grpo", automatic(3))
    one, two = (on_two(world, *arguments) for world in (stock, patched))
    ends = [found.error[:60] or f"loss {found.losses[-1]:.6g}" for found in (one, two)]
    numbers = [f"{found.reductions / 2:g}" for found in (one, two)]
    return f"| TRL, GRPO with LoRA | 3 | {ends[0]} | {numbers[0]} | {ends[1]} | {numbers[1]} |"


def main(release: str | None) -> None:
    print(f"DeepSpeed {release or version('deepspeed')}, torch {version('torch')}, ", end="")
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES), flush=True)
    outside = environment(release) if release else dict(os.environ)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        alone = stack.enter_context(World(1))
        stock = stack.enter_context(World(variables=outside))
        patched = stack.enter_context(World(variables=outside | variables.of_program(outside)))
        print("| script | stage | stock | reductions | patched | reductions |")
        print("|---|---|---|---|---|---|")
        for one in TRAININGS:
            try:
                start, reference = one.start(folder), one.on_one(alone, folder)
            except (AssertionError, ImportError) as why:  # these packages do not go together
                print(f"| {one.title} | | without DeepSpeed: {' '.join(str(why).split())[:160]} |")
                continue
            for stage in one.stock:
                found = [one.on_two(world, folder, stage) for world in (stock, patched)]
                told = " | ".join(cells(run, reference, start, one) for run in found)
                print(f"| {one.title} | {stage} | {told} |", flush=True)
        print(generating(folder, stock, patched), flush=True)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [None]))
