"""What real training code does around a step, for any trainer: its weights must be PyTorch's."""

from __future__ import annotations

from typing import Any

import torch

from tests.dc_fallback.cases import inputs

STEPS = 7  # DeepCompile compiles again in the sixth


def module_of(trainer: Any) -> torch.nn.Module:
    engine = getattr(trainer, "engine", None)
    module: torch.nn.Module = trainer.model if engine is None else engine.module
    return module


def plain(trainer: Any) -> None:
    for step in range(STEPS):
        trainer.backward(trainer(*inputs(step, 0)))
        trainer.step()


def bad_batch(trainer: Any) -> None:
    """It is dropped: by the engine, or by its optimizer."""
    for step in range(STEPS):
        trainer.backward(1000 * trainer(*inputs(step, 1)))
        engine = getattr(trainer, "engine", None)
        (trainer if engine is None or step % 2 else engine.optimizer).zero_grad()
        trainer.backward(trainer(*inputs(step, 0)))
        trainer.step()


def abandoned(trainer: Any) -> None:
    """A forward has no backward."""
    for step in range(STEPS):
        trainer(*inputs(step, 1))
        trainer.backward(trainer(*inputs(step, 0)))
        trainer.step()


def retained(trainer: Any) -> None:
    """Two backwards over one forward."""
    for step in range(STEPS):
        loss = trainer(*inputs(step, 0))
        trainer.backward(loss, retain_graph=True)
        trainer.backward(0.5 * loss)
        trainer.step()


def several(trainer: Any) -> None:
    """Two forwards, each with its backward, before one step."""
    for step in range(STEPS):
        for part in range(2):
            trainer.backward(trainer(*inputs(step, part)))
        trainer.step()


def hooked(trainer: Any) -> None:
    """Hooks make some gradients smaller."""
    for name, param in module_of(trainer).named_parameters():
        if name.endswith("weight"):
            param.register_hook(lambda grad: 0.5 * grad)
    if hasattr(trainer, "note"):
        trainer.note()  # they may stay
    plain(trainer)


def inference(trainer: Any) -> None:
    """An evaluation under ``inference_mode`` between steps."""
    for step in range(STEPS):
        with torch.inference_mode():
            trainer(*inputs(step, 7))
        trainer.backward(trainer(*inputs(step, 0)))
        trainer.step()


def two_micro_steps(trainer: Any) -> None:
    """Each begins with ``zero_grad()``, as loops that were written for PyTorch do."""
    for step in range(STEPS):
        for part in range(2):
            if hasattr(trainer, "engine") or not part:
                trainer.zero_grad()
            trainer.backward(trainer(*inputs(step, part)))
            trainer.step()


def bad_in_the_middle(trainer: Any) -> None:
    """A batch between two micro steps is dropped, and the first of them with it."""
    for step in range(STEPS):
        trainer.backward(trainer(*inputs(step, 0)))
        trainer.step()
        trainer.backward(1000 * trainer(*inputs(step, 2)))
        trainer.zero_grad()
        trainer.backward(trainer(*inputs(step, 1)))
        trainer.step()


#: By name: the script and its gradient_accumulation_steps.
ALL = {
    script.__name__: (script, 1)
    for script in (plain, bad_batch, abandoned, retained, several, hooked, inference)
} | {script.__name__: (script, 2) for script in (two_micro_steps, bad_in_the_middle)}
#: With nothing skipped, with some frames, and with all.
PATTERNS = ("Compiled", "Mixed", "Whole")
#: Those whose graphs run no hooks, as on stock.
HOOKS_RUN = ("Whole",)
CASES = [
    (pattern, name)
    for pattern in PATTERNS
    for name in ALL
    if name != "hooked" or pattern in HOOKS_RUN
]
