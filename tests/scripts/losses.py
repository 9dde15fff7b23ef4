"""More than one loss."""

from __future__ import annotations

from typing import Any

from tests.scripts.declared import RIGHT, WRONG, raises, script
from tests.scripts.models import batch, losses


@script({1: WRONG, 2: WRONG, 3: raises("size")}, model="Auxiliary")
def auxiliary_tensor(trainer: Any) -> None:
    """A tensor that the forward keeps on the module has a backward of its own."""
    for step in trainer.steps():
        tokens, classes = batch(step)
        first, second = losses(trainer(tokens), classes)
        trainer.backward(first + second, retain_graph=True)
        trainer.backward(trainer.module.aux)
        trainer.step()


@script({1: WRONG, 2: WRONG, 3: raises("size")})
def two_backwards(trainer: Any) -> None:
    """Two losses over one forward, one after the other."""
    for step in trainer.steps():
        tokens, classes = batch(step)
        first, second = losses(trainer(tokens), classes)
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)
        trainer.step()


assert RIGHT
