"""Scripts whose model recomputes by DeepSpeed's functions, and in plain PyTorch by PyTorch's."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness.models import Boom, RaiseInBackward, backward_that_raises, losses
from tests.harness.models.shapes import CLASSES, VOCABULARY, TwoHeads
from tests.harness.surroundings import streams

REENTRANT, NON_REENTRANT = "checkpoint", "non_reentrant_checkpoint"
plainly = partial(checkpoint, use_reentrant=False)


class Recomputed(TwoHeads):
    """Both blocks recompute, with dropout in them; `by` is the name of DeepSpeed's function."""

    by = ""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def trunk(self, tokens: Tensor) -> Tensor:
        from deepspeed import checkpointing

        recompute = getattr(checkpointing, self.by) if self.by else plainly
        x = self.embed(tokens)
        for block in self.blocks:
            x = recompute(partial(self.run, block), x)
        return x

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        """A recomputation raises where it is told to."""
        in_backward = torch._C._current_graph_task_id() != -1
        if RaiseInBackward.armed and in_backward and block is self.blocks[0]:
            raise Boom("in a recomputation")
        return block(self.dropout(x))


class Adapted(Recomputed):
    """Most of what is recomputed is frozen."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)
            block.norm.requires_grad_(False)


@contextmanager
def configured(**settings: Any) -> Iterator[None]:
    """DeepSpeed's functions with these settings, for two ranks that share a model.

    What goes to the CPU is a copy, as it is beside a GPU.
    """
    from deepspeed import checkpointing

    names = vars(checkpointing)
    before = dict(names)
    world = SimpleNamespace(
        get_model_parallel_rank=dist.get_rank,
        get_model_parallel_world_size=dist.get_world_size,
        get_model_parallel_group=lambda: dist.group.WORLD,
    )
    copy = names["copy_to_device"]

    def to_device(item: Any, device: Any, criterion_func: Any) -> Any:
        copied = copy(item, device, criterion_func)
        away = isinstance(device, torch.device)  # a text is the device that computes
        return tuple(map(torch.clone, copied)) if away else copied

    try:
        if settings:
            checkpointing.configure(world, **settings)
            names["copy_to_device"] = to_device
        yield
    finally:
        checkpointing.reset()
        for name in ("mpu", "mp_rank", "mp_size", "mp_group", "num_layers", "copy_to_device"):
            names[name] = before[name]
        checkpointing.configure(None)


def several(
    trainer: Any,
    *,
    by: str,
    backwards: int = 2,
    block: bool = False,
    fails: bool = False,
    **settings: Any,
) -> None:
    """Run several backwards over one forward; both ranks have one batch, as ranks of one model do.

    by: name of DeepSpeed's function. block: with one reduction. fails: the second step's first
    backward does, and the step is taken again.
    """
    trainer.module.by = by if trainer.is_engine else ""
    with streams(), configured(**settings):
        for step in trainer.steps():
            for micro in range(trainer.options.micro_steps):
                if fails and step == 1 and trainer.is_engine:
                    backward_that_raises(trainer, every_loss(trainer, step, micro)[0])
                every = every_loss(trainer, step, micro)[:backwards]
                with trainer.window() if block else nullcontext():
                    for index, loss in enumerate(every):
                        trainer.backward(loss, retain_graph=index < backwards - 1)
                trainer.step()


def every_loss(trainer: Any, step: int, micro: int) -> list[Tensor]:
    torch.manual_seed(100 * step + micro)
    tokens = torch.randint(VOCABULARY, (6,))
    first, second = losses(trainer(tokens), tokens % CLASSES)
    return [first, second, first * second]
