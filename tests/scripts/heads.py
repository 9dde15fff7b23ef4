"""Steps and micro steps that use one of two heads: the other has no gradient, or an older one."""

from typing import Any

import torch

from tests.harness.models import batch, both_losses, loss_of, losses
from tests.harness.options import OVERLAP
from tests.scripts.declared import RIGHT, WRONG, raises, script

FIRST, SECOND, BOTH = slice(1), slice(1, 2), slice(2)


@script({1: RIGHT, 2: RIGHT, 3: WRONG}, at_rest=False)
def used_in_the_first_step_only(trainer: Any, step: int) -> None:
    """One head has no backward in later steps."""
    trainer.backward(loss_of(trainer, step, only=FIRST if step else BOTH))


@script({1: RIGHT, 2: RIGHT, 3: WRONG}, at_rest=False, micro_steps=2)
def head_used_late(trainer: Any, step: int, micro: int) -> None:
    """A later backward of a step is the first to reach one head."""
    trainer.backward(loss_of(trainer, step, micro, slice(micro + 1)))


@script({1: WRONG, 2: RIGHT, 3: WRONG}, at_rest=False, micro_steps=2, **OVERLAP)
def other_head_in_each_micro_step(trainer: Any, step: int, micro: int) -> None:
    """The last micro step does not reach what the first one trains."""
    trainer.backward(loss_of(trainer, step, micro, SECOND if micro == 0 else FIRST))


@script({1: WRONG, 2: WRONG, 3: WRONG})
def one_head_then_the_other(trainer: Any, step: int) -> None:
    """Three forwards, then backwards that reach one head after the other."""
    batches = [batch(step, micro) for micro in range(3)]
    outputs = [(trainer(tokens), classes) for tokens, classes in batches]
    for (output, classes), head in zip(outputs, (0, 0, 1), strict=True):
        trainer.backward(losses(output, classes)[head])


@script({1: WRONG, 2: WRONG, 3: raises("size of tensor a (0)")})
def one_head_rests(trainer: Any, step: int) -> None:
    """In every other step no backward reaches the second head."""
    first, second = both_losses(trainer, step)
    for loss in [first, second] if step % 2 == 0 else [first, 2 * first]:
        trainer.backward(loss, retain_graph=True)


@script({1: WRONG, 2: WRONG, 3: WRONG})
def parts_then_whole(trainer: Any, step: int) -> None:
    """Steps differ: other heads, another number of backwards, an evaluation in between."""
    with torch.no_grad():
        trainer(batch(step)[0])
    first, second = both_losses(trainer, step)
    for loss in ([second, first], [first + second], [first, second, first])[step % 3]:
        trainer.backward(loss, retain_graph=True)
