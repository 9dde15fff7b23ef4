"""Hooks of the user's beside DeepSpeed's."""

from typing import Any

from tests.harness.models import loss_of
from tests.scripts.declared import ALL_RIGHT, script
from tests.scripts.ordinary import one_backward


@script(ALL_RIGHT)
def parameter_hook(trainer: Any) -> None:
    """``param.register_hook`` makes some gradients smaller."""
    handles = [
        param.register_hook(lambda grad: 0.5 * grad)
        for param in trainer.module.blocks.parameters()
        if param.requires_grad
    ]
    one_backward(trainer)
    for handle in handles:
        handle.remove()


@script(ALL_RIGHT)
def backward_hook(trainer: Any) -> None:
    """``register_full_backward_hook`` on each block, as probes have it."""
    seen: list[float] = []
    handles = [
        block.register_full_backward_hook(lambda m, i, grads: seen.append(float(grads[0].norm())))
        for block in trainer.module.blocks
    ]
    one_backward(trainer)
    for handle in handles:
        handle.remove()
    assert len(seen) == 2 * trainer.count


@script(ALL_RIGHT)
def accumulation_hook(trainer: Any) -> None:
    """A hook on the AccumulateGrad node of each parameter counts gradients."""
    count = 0

    def note(*_: Any) -> None:
        nonlocal count
        count += 1

    for step in trainer.steps():
        nodes = [
            param.expand_as(param).grad_fn.next_functions[0][0]
            for param in trainer.module.parameters()
            if param.requires_grad
            and param.numel()  # partitioned ones have a node of their own in each forward
        ]
        handles = [node.register_hook(note) for node in nodes]
        trainer.backward(loss_of(trainer, step))
        trainer.step()
        for handle in handles:
            handle.remove()
