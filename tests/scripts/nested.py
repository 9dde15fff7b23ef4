"""Backwards inside a backward, as cached losses have them: mini-batches run in a hook."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.harness.models import RaiseInBackward, batch, loss_of
from tests.scripts.declared import ALL_RIGHT, RIGHT, WRONG, raises, script

#: Stock reduces the outer backward before the inner one has begun.
TWICE = "already been reduced"


def cached_loss(
    trainer: Any, step: int, parts: int = 3, failing: int | None = None, hook_of: str = "leaf"
) -> Tensor:
    """Return a loss over a batch in `parts`, whose backwards run in a hook of the loss.

    failing: the part whose backward raises Boom. hook_of: "leaf"; "output", which is made of one;
    or "loss", where it is the leaf.
    """
    batches = [batch(step, part)[0] for part in range(parts)]
    with torch.no_grad():
        leaves = [trainer(tokens)[1].requires_grad_() for tokens in batches]
    with torch.enable_grad():
        loss = torch.cat(leaves).square().mean()
        gradients = torch.autograd.grad(loss, leaves)

    def backwards() -> None:
        for part, (tokens, gradient) in enumerate(zip(batches, gradients, strict=True)):
            RaiseInBackward.armed = part == failing
            (trainer(tokens)[1] * gradient).sum().backward()

    leaf = loss.detach().requires_grad_()
    loss = hooked(1.0 * leaf if hook_of == "output" else leaf, backwards)
    return 1.0 * loss if hook_of == "leaf" else loss


def hooked(loss: Tensor, run: Callable[[], None]) -> Tensor:
    """`loss`, in whose backward `run` is called."""

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            run()

    loss.register_hook(hook)
    return loss


@script({1: RIGHT, 2: raises(TWICE), 3: WRONG}, at_rest=False)
def cached(trainer: Any, step: int, backwards: int = 3) -> None:
    """A loss over three mini-batches runs their backwards inside its own."""
    trainer.backward(cached_loss(trainer, step, backwards))


@script(dict.fromkeys((1, 2, 3), raises("loss must be a scalar tensor")), at_rest=False)
def cached_as_a_leaf(trainer: Any, step: int) -> None:
    """The same, and the loss is a leaf, as a framework gets it."""
    trainer.backward(cached_loss(trainer, step, hook_of="loss"))


@script(ALL_RIGHT, at_rest=False)
def cached_in_a_window(trainer: Any, step: int, backwards: int = 3) -> None:
    """The same in a window, beside a backward that is an ordinary one."""
    with trainer.window():
        trainer.backward(loss_of(trainer, step, 9))
        trainer.backward(cached_loss(trainer, step, backwards))


@script({1: RIGHT, 2: raises("no_sync"), 3: raises("no_sync")}, at_rest=False)
def cached_in_no_sync(trainer: Any, step: int) -> None:
    """A cached loss in no_sync(), and one after it."""
    with trainer.no_sync():
        trainer.backward(cached_loss(trainer, step))
    trainer.backward(cached_loss(trainer, step + 5))


@script({1: WRONG, 2: raises(TWICE), 3: RIGHT}, at_rest=False)
def cached_after_another(trainer: Any, step: int) -> None:
    """A cached loss after an ordinary backward of the same step."""
    trainer.backward(loss_of(trainer, step, 9))
    trainer.backward(cached_loss(trainer, step))


@script({1: RIGHT, 2: raises(TWICE), 3: WRONG}, at_rest=False)
def nested(trainer: Any, step: int) -> None:
    """The backward over one batch runs inside that over another."""
    outer, inner = (loss_of(trainer, step, micro) for micro in range(2))
    trainer.backward(hooked(outer, inner.backward))


@script({1: RIGHT, 2: raises(TWICE), 3: WRONG}, at_rest=False)
def cached_behind_an_output(trainer: Any, step: int) -> None:
    """A cached loss that is multiplied by a factor, as in sentence-transformers."""
    trainer.backward(cached_loss(trainer, step, hook_of="output"))
