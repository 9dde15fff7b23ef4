"""One script by a DeepSpeed engine, on stock or patched, and by plain PyTorch, from one start.

    def two_backwards(trainer: Any, step: int) -> None:
        first, second = both_losses(trainer, step)
        trainer.backward(first, retain_graph=True)
        trainer.backward(second)

    def test_two_backwards(world):
        check(world, two_backwards, Options(stage=3, **OFFLOADED), "zero3_retain")

Scripts that say what stock comes to are in `tests/scripts`, and can be run here too.
"""
# ruff: noqa: F403

from tests.harness.cases import *
from tests.harness.collectives import *
from tests.harness.groups import *
from tests.harness.options import *
from tests.harness.run import *
from tests.harness.surroundings import *
from tests.harness.trainers import *
from tests.world import *
