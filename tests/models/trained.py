"""What is done with a model, and how far from plain PyTorch its weights end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

import ds_patches
from tests.harness.options import Options
from tests.harness.run import measure
from tests.models import zoo
from tests.world import RankError, World, WorldTimeout

STAGES = (0, 1, 2, 3)
#: Of the farthest that any weight has moved; more is no rounding of single precision.
EXACT = 1e-5
SECONDS = 60.0


def forward(trainer: Any, name: str, *at: int) -> Any:
    """Over a batch of this rank's, another one at each step and micro step."""
    seed = sum(number * 10**place for place, number in enumerate((dist.get_rank(), *at), 1))
    return trainer(**zoo.batch(name, seed))


def micro_steps(trainer: Any, name: str) -> None:
    """Two steps of two micro steps."""
    for step in trainer.steps():
        for micro in range(2):
            trainer.backward(forward(trainer, name, step, micro).loss)
            trainer.step()


def two_losses(trainer: Any, name: str) -> None:
    """Two backwards over one forward: of the loss, and of what the model returns first."""
    for step in trainer.steps():
        outputs = forward(trainer, name, step)
        trainer.backward(outputs.loss, retain_graph=True)
        other: Tensor = next(it for what, it in outputs.items() if "loss" not in what)
        trainer.backward(other.square().mean())
        trainer.step()


def block(trainer: Any, name: str) -> None:
    """Two forwards and backwards, and one reduction."""
    for step in trainer.steps():
        with trainer.window():
            for part in range(2):
                trainer.backward(forward(trainer, name, step, part).loss)
        trainer.step()


#: What is done, and at which stages. There is no block at stage 0.
WORK: dict[str, tuple[Callable[[Any, str], None], tuple[int, ...]]] = {
    "micro steps": (micro_steps, STAGES),
    "two losses": (two_losses, STAGES),
    "block": (block, STAGES[1:]),
}


def far(name: str, work: str, stage: int, patched: bool) -> tuple[float, str]:
    """Runs on a rank: how far its weights end from plain PyTorch's, or the first words of an error.

    A process of stock's has never had a patch applied.
    """
    if patched:
        ds_patches.apply_all()
    assert any(map(ds_patches.is_applied, ds_patches.names())) == patched
    script, micro = WORK[work][0], 2 if work == "micro steps" else 1
    model: Any = partial(zoo.build, name)
    options = Options(stage=stage, steps=2, micro_steps=micro, model=model)
    # Not strict: transformers leaves hooks of its own at the first forward.
    found = measure(partial(script, name=name), options, strict=False)
    assert found.moved > 1e-3
    said = f"warning: {found.said[0]}" if patched and found.said else ""
    return found.difference / found.moved, found.error or said


def told(world: World, *case: Any) -> str | float:
    """The farthest of all ranks; or what has ended them."""
    try:
        answers = world.within(SECONDS).run(far, *case)
    except WorldTimeout:
        return "hangs"
    except RankError as error:
        return str(error).splitlines()[0]
    errors = [error for _, error in answers if error]
    return errors[0] if errors else max(difference for difference, _ in answers)


def is_right(what: str | float) -> bool:
    return not isinstance(what, str) and what <= EXACT
