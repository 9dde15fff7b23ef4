"""The runs that are compared: from one start, over the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from examples import digits
from examples.gradcache.train import TwoTowers, contrast, step

#: Of a loss of about 5, in float32: chunks are summed in another order than a whole batch, and on
#: GPUs by other kernels.
ROUNDING = 1e-4


@dataclass(frozen=True)
class Work:
    """A training. A rank has `chunks` chunks of `chunk` images in each step."""

    steps: int = 30
    chunks: int = 8
    chunk: int = 16

    @property
    def batch(self) -> int:
        """Images per step, over all ranks."""
        return self.chunks * self.chunk * dist.get_world_size()

    def batches(self) -> Iterator[Tensor]:
        """No image is in a batch twice. Alike on all ranks."""
        images, _ = digits.load()
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.steps):
            yield images[torch.randperm(len(images), generator=generator)[: self.batch]]


@dataclass
class Curve:
    """The loss of every step; and the reductions in each step's backwards, where it has any."""

    losses: list[float] = field(default_factory=list)
    reductions: set[int] = field(default_factory=set)
    error: str = ""

    def off(self, other: Curve) -> float:
        """The largest difference of a step's loss; NaN is largest of all."""
        differences = (abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))
        return max(differences, key=lambda d: (d != d, d))

    def fault(self, plain: Curve) -> str:
        """Return what is wrong with the curve of a run with a block, or ""."""
        if self.error:
            return self.error
        if not self.off(plain) <= ROUNDING:  # NaN too
            return f"a loss is {self.off(plain):.1e} off plain PyTorch's"
        if self.reductions != {1}:
            return f"its steps send {sorted(self.reductions)} reductions, not one"
        return ""


def _start() -> tuple[TwoTowers, torch.optim.Optimizer]:
    """Not Adam, whose steps do not depend on the gradients' scale: a wrong one must show."""
    torch.manual_seed(0)
    model = TwoTowers().to(get_accelerator().current_device_name())
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def full_batch(work: Work) -> Curve:
    """Plain PyTorch: the whole batch in one forward and backward, and no other rank."""
    (model, optimizer), curve = _start(), Curve()
    device = next(model.parameters()).device
    for images in work.batches():
        loss = contrast(model(images.to(device)))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        curve.losses.append(loss.item())
    return curve


def cached(stage: int, work: Work, *, block: bool) -> Curve:
    """GradCache by a DeepSpeed engine. Without a block a step is one backward after the other."""
    engine, curve = _engine(stage, work), Curve()
    try:
        for images in work.batches():
            own = images.chunk(dist.get_world_size())[dist.get_rank()].to(engine.device)
            around = engine.coalesce_grad_reduction() if block else nullcontext()
            loss = step(engine, own, work.chunk, _counted(around, curve))
            curve.losses.append(loss.item())
    except Exception as error:  # stock raises on some releases
        curve.error = f"{type(error).__name__}: {error}"
    return curve


def _engine(stage: int, work: Work) -> Any:
    model, optimizer = _start()
    settings = {
        "train_micro_batch_size_per_gpu": work.chunk,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,  # SGD
        "gradient_clipping": 0.0,  # recent releases clip at 1 unless told not to
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,  # partition the smallest parameter too
            "reduce_bucket_size": 1_000_000,
        },
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


class _Reductions(TorchDispatchMode):
    """Counts the reductions of gradients: every collective passes PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d" and "reduce" in function._schema.name:
            tensors = [tensor for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)]
            self.sent += any(tensor.is_floating_point() for tensor in tensors)
        return function(*args, **(kwargs or {}))


@contextmanager
def _counted(block: AbstractContextManager[Any], curve: Curve) -> Iterator[None]:
    with _Reductions() as reductions, block:
        yield
    curve.reductions.add(reductions.sent)
