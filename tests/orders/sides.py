"""Base of plain PyTorch and DeepSpeed's engines, as they go through an order."""

import gc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_patches.core.errors import DsPatchesError
from tests.harness import models, parameters
from tests.harness.models.raising import Boom, RaiseInBackward
from tests.orders.words import BLOCKS, Order

WIDTH, INNER = 6, 16


class Small(nn.Module):
    """Float inputs; raises half way through its backward, if it is to.

    repeats: its layers run twice, each time in a reentrant checkpoint, whose backward is one of its
    own inside the loss's: each parameter's gradient arrives twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, INNER), nn.LayerNorm(INNER)
        self.last = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor, repeats: bool = False) -> Tensor:
        if repeats:
            for _ in range(2):
                x = checkpoint(self.layers, x, use_reentrant=True)
            return x
        return self.layers(x)

    def layers(self, x: Tensor) -> Tensor:
        return x + self.last(RaiseInBackward.apply(self.norm(self.first(x))).tanh())


@dataclass
class Trail:
    """Values seen on the way: after each step the parameters, and others.

    patched: of each, whether all patches were applied from its step's beginning on.
    raised_patched: the same of the step that has raised `error`.
    """

    seen: list[Tensor] = field(default_factory=list)
    patched: list[bool] = field(default_factory=list)
    raised_patched: bool = True
    error: str = ""
    is_ours: bool = False


class Left(Exception):
    """An exception that leaves a block, and is caught outside."""


class Side:
    """Base of both sides. A word that makes no sense where it is does nothing."""

    def __init__(self, order: Order) -> None:
        self.order, self.options, self.trail = order, order.options, Trail()
        self.counts: dict[int, int] = {}  # of micro steps
        self.held = False  # a forward or backward since the last whole step
        self.losses: list[tuple[Tensor, Tensor]] = []  # with the inputs, to have backwards
        self.forwards = self.open = 0
        self.patched = self.patched_since = False
        self.critic: Any = None

    def start(self) -> None:
        self.modules: list[nn.Module] = [self.model()]
        self.engines: list[Any] = [self.build(self.modules[0])]
        self.now = self.engines[0]
        if "chain" in self.order.words:
            self.modules.append(self.model())
            self.critic = self.build(self.modules[1])

    def model(self) -> nn.Module:
        return models.build(Small, self.options.torch_dtype)

    def go(self) -> Trail:
        try:
            self.start()
            self.see_parameters()
            self.do(list(self.order.words))
            self.see_parameters()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.trail.error = f"{type(error).__name__}: {lines[0][:160]}"
            self.trail.is_ours = isinstance(error, DsPatchesError)
            self.trail.raised_patched = self.patched_since
        return self.trail

    def do(self, words: list[str]) -> None:
        while words:
            word = words.pop(0)
            if word == "}":
                return
            if word in BLOCKS:
                self.in_block(word, words)
            elif "apply" in word:
                self.patch(*word.split(":"))
            else:
                getattr(self, word.replace(".", "_"))()

    def in_block(self, kind: str, words: list[str]) -> None:
        if self.open:  # of blocks in a block both refuse
            return self.do(words)
        self.open += 1
        with suppress(Left):
            (self._closed if kind == "closed{" else self._left)(kind, words)
        self.open -= 1
        return None

    def _left(self, kind: str, words: list[str]) -> None:
        with self.window(drops=kind == "raise{"):
            self.do(words)
            if kind == "raise{":
                raise Left

    def _closed(self, kind: str, words: list[str]) -> None:
        def generator() -> Iterator[None]:
            with self.window():
                self.do(words)
                yield

        running = generator()
        next(running)
        running.close()

    # --- Words ----------------------------------------------------------------------------------

    def batch(self) -> tuple[Tensor, Tensor]:
        """Another one in each forward, and on each rank."""
        self.forwards += 1
        generator = torch.Generator().manual_seed(100 * self.forwards + dist.get_rank())
        x, y = torch.randn(2, 4, WIDTH, generator=generator)
        return x.to(self.dtype).requires_grad_(), y

    def forward(self, *through: Any, **how: Any) -> None:
        x, y = self.batch()
        out = x
        self.train(True)
        for engine in through or (self.now,):
            out = engine(out, **how)
        self.held = True
        self.losses.append(((out.float() - y).square().mean(), x))

    def reentrant(self) -> None:
        self.forward(repeats=True)

    def summed(self) -> None:
        """One backward of all losses that wait for one."""
        if self.losses:
            losses = [loss for loss, _ in self.losses]
            self.losses.clear()
            self.run_backward(torch.stack(losses).sum(), False)

    def freeze(self) -> None:
        """A part of the model, until the next forward: its gradients of this step stay."""
        self.train(False)

    def train(self, trained: bool) -> None:
        self.now.module.first.requires_grad_(trained)

    def chain(self) -> None:
        self.forward(self.now, self.critic)

    def twice(self) -> None:
        self.forward(self.now, self.now)

    def evaluate(self) -> None:
        self.now.eval()
        with torch.no_grad():
            self.see(self.now(self.batch()[0]))
        self.now.train()

    def grad(self) -> None:
        if self.losses:
            loss, x = self.losses[-1]
            self.see(torch.autograd.grad(loss, x, retain_graph=True)[0])

    def backward(self) -> None:
        if self.losses:
            self.run_backward(self.losses.pop()[0], False)

    def again(self) -> None:
        if self.losses:
            self.run_backward(self.losses[-1][0], True)

    def loss_backward(self) -> None:
        if self.losses:
            self.plain_backward(self.losses.pop()[0])

    def boom(self) -> None:
        """A backward that raises, and is caught; a block would refuse to have that in it."""
        if self.open:
            return
        self.forward()
        RaiseInBackward.armed = True
        try:
            self.run_backward(self.losses.pop()[0], False)
        except Boom:
            self.boomed()
        finally:
            RaiseInBackward.armed = False

    def cached(self) -> None:
        """A loss of what is known of the outputs; their backward runs inside its own."""
        x, y = self.batch()
        with torch.no_grad():
            known = self.now(x).float().requires_grad_()

        def hook(grad: Tensor) -> None:
            with torch.enable_grad():
                self.run_backward((self.now(x) * grad).sum(), False)

        known.register_hook(hook)
        self.run_backward((known - y).square().mean(), False)

    def lone(self) -> None:
        """One rank alone has a backward, and where it may, a forward."""
        if not dist.get_rank():
            self.forward()
            self.backward()
        elif self.options.stage == 3:
            self.forward()
            self.losses.pop()

    def unrelated(self) -> None:
        self.run_backward(torch.ones(3, requires_grad=True).square().sum(), False)

    def step(self) -> None:
        count = self.counts[id(self.now)] = self.counts.get(id(self.now), 0) + 1
        managed = "unmanaged" not in self.order.settings
        whole = not (managed and count % self.options.micro_steps)
        for engine in filter(None, (self.now, self.critic)):
            self.take_step(engine, whole)
        if whole:
            self.losses.clear()
            self.held = False
            self.see_parameters()
            self.patched_since = self.patched

    def second(self, module: nn.Module | None = None) -> None:
        if not self.between_steps:
            return
        self.losses.clear()
        self.train(True)  # DeepSpeed trains only what is trainable as the engine is built
        self.now = self.build(module or self.modules[0])
        self.engines.append(self.now)

    def shared(self) -> None:
        if self.between_steps:
            module = self.model()
            module.first = self.modules[0].first
            self.modules.append(module)
            self.second(module)

    def other(self) -> None:
        """Go on with the engine before, whose weights are old once this one has trained."""
        if self.between_steps and not self.counts.get(id(self.now)):
            self.losses.clear()
            self.now = self.engines[self.engines.index(self.now) - 1]

    def forget(self) -> None:
        self.engines = [self.now]
        gc.collect()

    @property
    def between_steps(self) -> bool:
        counted = self.counts.get(id(self.now), 0) % self.options.micro_steps
        return not (counted or self.held or self.open)

    def see_parameters(self) -> None:
        for module in self.modules:
            self.see(torch.cat([weight.flatten() for weight in parameters(module).values()]))

    def see(self, value: Tensor) -> None:
        self.trail.seen.append(value.detach().float().cpu().clone())
        self.trail.patched.append(self.patched_since)
