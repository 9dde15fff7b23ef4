"""Trainers and scripts for backwards outside any window: `no_sync()`, boundaries, micro steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from tests.coalesce import cases
from tests.zero3_retain import models, trainers
from tests.zero3_retain.cases import half_precision_allowed

OFFLOADED = {"zero": {"offload_optimizer": {"device": "cpu"}}}
OVERLAP = {"zero": {"overlap_comm": True}}


class PlainTrainer(cases.PlainTrainer):
    """Plain PyTorch reduces at the step: synced or not, boundary or not, gradients add up."""

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def boundary(self, at: bool | None) -> None:
        pass


class EngineTrainer(cases.EngineTrainer):
    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.engine.no_sync()
        return context

    def boundary(self, at: bool | None) -> None:
        self.engine.set_gradient_accumulation_boundary(at)


class DDPTrainer(PlainTrainer):
    """PyTorch's own data parallel training, the model of `no_sync()`."""

    def __init__(self, model: torch.nn.Module, micro_steps: int = 1) -> None:
        super().__init__(model, micro_steps)
        self._ddp = torch.nn.parallel.DistributedDataParallel(model)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._ddp(*inputs)

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._ddp.no_sync()
        return context

    def step(self) -> None:
        """Gradients are averaged already."""
        with torch.no_grad():
            for param in self.model.parameters():
                param -= trainers.RATE * param.grad
        self.model.zero_grad()


def outcome(
    script: cases.Script,
    model: str = "TwoHeads",
    *,
    stage: int,
    dtype: str = "float32",
    reference: type[Any] = PlainTrainer,
    **case: Any,
) -> cases.Outcome:
    """`outcome_of` a model of tests.zero3_retain.models, or of the cases here."""
    start = models.build(
        getattr(cases, model, None) or getattr(models, model), getattr(torch, dtype)
    )
    with half_precision_allowed() if dtype == "float16" else nullcontext():
        return outcome_of(script, start, stage=stage, reference=reference, **case)


def outcome_of(
    script: cases.Script,
    start: torch.nn.Module,
    *,
    stage: int,
    reference: type[Any] = PlainTrainer,
    **case: Any,
) -> cases.Outcome:
    """What became of `script`."""
    return cases.run(script, start, stage, trainer_class=EngineTrainer, reference=reference, **case)


# --- Scripts ------------------------------------------------------------------------------------


def one_backward(trainer: Any, step: int, index: int = 0, only: slice = slice(None)) -> None:
    tokens, classes = models.batch(step, index)
    trainer.backward(sum(models.losses(trainer.forward(tokens), classes)[only]))


def all_but_the_last_unsynced(trainer: Any, backwards: int = 3, steps: int = 3) -> None:
    for step in range(steps):
        with trainer.no_sync():
            for index in range(backwards - 1):
                one_backward(trainer, step, index)
        one_backward(trainer, step, backwards - 1)
        trainer.step()


def stepping_inside(trainer: Any, micro_steps: int = 2) -> None:
    """As Accelerate does up to 1.7: every micro step is stepped, also those without sync."""
    for step in range(3):
        for index in range(micro_steps):
            last = index == micro_steps - 1
            with nullcontext() if last else trainer.no_sync():
                one_backward(trainer, step, index)
                trainer.step()


def micro_steps(trainer: Any, count: int = 2) -> None:
    """DeepSpeed's own loop."""
    for step in range(3):
        for index in range(count):
            one_backward(trainer, step, index)
            trainer.step()


def by_hand(trainer: Any, count: int = 3) -> None:
    """Boundaries that the user sets, as Accelerate does from 1.8, in 1.8 inside ``no_sync()``."""
    for step in range(3):
        for index in range(count):
            trainer.boundary(index == count - 1)
            one_backward(trainer, step, index)
        trainer.step()


def synced_in_between(trainer: Any) -> None:
    """What was reduced earlier in a step is added to."""
    for step in range(3):
        with trainer.no_sync():
            one_backward(trainer, step, 0)
        one_backward(trainer, step, 1)
        with trainer.no_sync():
            one_backward(trainer, step, 2)
        one_backward(trainer, step, 3)
        trainer.step()


def beside_windows(trainer: Any) -> None:
    """Gradients that wait are reduced by a window too; what comes after one is added to it."""
    for step in range(3):
        with trainer.no_sync():
            one_backward(trainer, step, 0)
        with trainer.window():
            one_backward(trainer, step, 1)
            one_backward(trainer, step, 2)
        if step:
            one_backward(trainer, step, 3)
        trainer.step()


def among_micro_steps(trainer: Any) -> None:
    """Of three micro steps, the second has two backwards without a reduction."""
    for step in range(3):
        one_backward(trainer, step, 0)
        trainer.step()
        with trainer.no_sync():
            one_backward(trainer, step, 1)
            one_backward(trainer, step, 2)
        trainer.step()
        one_backward(trainer, step, 3)
        trainer.step()


def two_windows(trainer: Any) -> None:
    """Each is a micro step of two."""
    for step in range(3):
        for part in range(2):
            with trainer.window():
                one_backward(trainer, step, 2 * part)
                one_backward(trainer, step, 2 * part + 1)
            trainer.step()


def two_windows_before_one_step(trainer: Any) -> None:
    for step in range(3):
        for part in range(2):
            with trainer.window():
                one_backward(trainer, step, 2 * part)
                one_backward(trainer, step, 2 * part + 1)
        trainer.step()


def windows_among_micro_steps(trainer: Any) -> None:
    """Of three micro steps, the second is a window."""
    for step in range(3):
        one_backward(trainer, step, 0)
        trainer.step()
        with trainer.window():
            one_backward(trainer, step, 1)
            one_backward(trainer, step, 2)
        trainer.step()
        one_backward(trainer, step, 3)
        trainer.step()


def resting_heads(trainer: Any) -> None:
    """Parameters with a gradient without sync and none with it, or on one rank only, or never."""
    rank = dist.get_rank()
    for step in range(4):
        for index, used in enumerate([slice(0, 2), slice(0, 1), slice(rank, rank + 1)]):
            cases.Either.used = used
            with trainer.no_sync() if index < 2 else nullcontext():
                one_backward(trainer, step, index, slice(1) if index or step == 1 else slice(2))
        trainer.step()
    cases.Either.used = slice(0, 2)


def unlike_numbers(trainer: Any) -> None:
    """One rank has more backwards than the other."""
    for step in range(3):
        with trainer.no_sync():
            for index in range(1 + dist.get_rank() * step):
                one_backward(trainer, step, index)
        one_backward(trainer, step, 9)
        trainer.step()


def dropped_by_zero_grad(trainer: Any) -> None:
    for step in range(3):
        with trainer.no_sync():
            one_backward(trainer, step, 5)
        trainer.zero_grad()
        with trainer.no_sync():
            one_backward(trainer, step, 0)
        one_backward(trainer, step, 1)
        trainer.step()


def over_one_forward(trainer: Any) -> None:
    """Two backwards over each forward: in no_sync(), across its end, and at the boundary."""
    for step in range(3):
        with trainer.no_sync():
            tokens, classes = models.batch(step, 0)
            first, second = models.losses(trainer.forward(tokens), classes)
            trainer.backward(first, retain_graph=True)
            trainer.backward(second)
            tokens, classes = models.batch(step, 1)
            first, second = models.losses(trainer.forward(tokens), classes)
            trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        tokens, classes = models.batch(step, 2)
        first, second = models.losses(trainer.forward(tokens), classes)
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        trainer.step()


def twice_at_the_boundary(trainer: Any) -> None:
    """Two forwards and backwards before one step, each taken for the last."""
    for step in range(3):
        for index in range(2):
            one_backward(trainer, step, index)
        trainer.step()


def two_forwards_first(trainer: Any) -> None:
    for step in range(3):
        batches = [models.batch(step, index) for index in range(2)]
        outputs = [(trainer.forward(tokens), classes) for tokens, classes in batches]
        for output, classes in outputs:
            trainer.backward(sum(models.losses(output, classes)))
        trainer.step()


def by_hand_and_on(trainer: Any) -> None:
    """Not at the boundary, at it, not, and at it."""
    for step in range(3):
        for index in range(4):
            trainer.boundary(index % 2 == 1)
            one_backward(trainer, step, index)
        trainer.step()


def both_over_one_forward(trainer: Any) -> None:
    for step in range(3):
        tokens, classes = models.batch(step)
        first, second = models.losses(trainer.forward(tokens), classes)
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        trainer.step()
