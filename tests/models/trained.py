"""Trainings of a model, and how far from plain PyTorch its weights end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


def batch(name: str, *indices: int) -> zoo.Batch:
    """A batch of this rank's, another one at each step and micro step."""
    seed = sum(number * 10**place for place, number in enumerate((dist.get_rank(), *indices), 1))
    return zoo.batch(name, seed)


def forward(trainer: Any, name: str, *indices: int) -> Any:
    return trainer(**batch(name, *indices))


def micro_steps(trainer: Any, step: int, micro: int, name: str) -> None:
    """Two steps of two micro steps."""
    trainer.backward(forward(trainer, name, step, micro).loss)


def two_losses(trainer: Any, step: int, name: str) -> None:
    """Two backwards over one forward: of the loss, and of what the model returns first."""
    outputs = forward(trainer, name, step)
    trainer.backward(outputs.loss, retain_graph=True)
    other: Tensor = next(it for what, it in outputs.items() if "loss" not in what)
    trainer.backward(other.square().mean())


def block(trainer: Any, step: int, name: str) -> None:
    """Two forwards and backwards, and one reduction."""
    with trainer.window():
        for part in range(2):
            trainer.backward(forward(trainer, name, step, part).loss)


def two_forwards(trainer: Any, step: int, name: str) -> None:
    """Two forwards of the engine, and one backward of the sum of their losses."""
    trainer.backward(sum(forward(trainer, name, step, part).loss for part in range(2)))


def two_forwards_inside(trainer: Any, step: int, name: str) -> None:
    """One forward of a module that runs the model twice."""
    trainer.backward(trainer(batch(name, step, 0), batch(name, step, 1)))


@dataclass(frozen=True)
class Work:
    """A script, and the stages at which it runs. There is no block at stage 0.

    model: options of `zoo.build`. more: further `Options`.
    """

    script: Callable[..., None]
    stages: tuple[int, ...] = STAGES
    model: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


#: At ZeRO 1 without `overlap_comm`, DeepSpeed reduces what a whole backward has added up.
OVERLAPPED = {"overlap_comm": True}
ONE_BUCKET = {"reduce_bucket_size": 10**6}
CHECKPOINTING = {"": None, ", checkpointed": False, ", reentrant": True}
WORK: dict[str, Work] = {
    "micro steps": Work(micro_steps, more={"micro_steps": 2}),
    "two losses": Work(two_losses),
    "block": Work(block, STAGES[1:]),
}
for how, use_reentrant in CHECKPOINTING.items():
    inside = {"use_reentrant": use_reentrant, "wrapped": True}
    WORK |= {
        f"two forwards{how}": Work(
            two_forwards, STAGES[1:], {"use_reentrant": use_reentrant}, {"zero": OVERLAPPED}
        ),
        f"two forwards inside{how}": Work(
            two_forwards_inside, STAGES[1:], inside, {"zero": OVERLAPPED | ONE_BUCKET}
        ),
    }


def far(name: str, work: str, stage: int, patched: bool) -> tuple[float, str]:
    """Runs on a rank: how far its weights end from plain PyTorch's, or the first words of an error.

    A process of stock's has never had a patch applied.
    """
    if patched:
        ds_patches.apply_all()
    assert any(map(ds_patches.is_applied, ds_patches.names())) == patched
    task = WORK[work]
    model: Any = partial(zoo.build, name, **task.model)
    options = Options(stage=stage, steps=2, model=model, **task.more)
    # Not strict: transformers leaves hooks of its own at the first forward.
    outcome = measure(partial(task.script, name=name), options, strict=False)
    assert 1e-3 < outcome.moved < float("inf")
    warning = f"warning: {outcome.said[0]}" if patched and outcome.said else ""
    return outcome.difference / outcome.moved, outcome.error or warning


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
