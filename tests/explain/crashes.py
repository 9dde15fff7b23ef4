"""Scripts that end in the errors people search for.

`python -m tests.explain.crashes SCRIPT ...` writes what each says into `said/`, on the DeepSpeed
that is first on the path: it has to have the defect. Those of TWO_RANKS want torchrun.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.explain import SAID

ROOT = Path(__file__).parents[2]
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
TWO_RANKS = (
    "inference_mode",
    "inference_mode_over_a_sum",
    "generation_without_hooks",
    "saved_module",
    "split_view",
)
_FOLDERS = re.compile(r'File "[^"]*?/(?:site-packages|\.releases/[\d.]+|lib/python3\.\d+)/')


def engine_of(model: nn.Module, stage: int, threshold: int = 0, **config: Any) -> Any:
    """An engine for the parameters that are trained; none above the threshold stays whole."""
    config["zero_optimization"] = {
        "stage": stage,
        "stage3_param_persistence_threshold": threshold,
    }
    config |= {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def batch() -> torch.Tensor:
    return torch.ones(2, 8, requires_grad=True)


def two_backwards(stage: int = 3) -> None:
    engine = engine_of(mlp(), stage)
    out = engine(batch())
    engine.backward(out.sum(), retain_graph=True)
    engine.backward(out.pow(2).sum())
    engine.step()


def two_backwards_at_stage_1() -> None:
    two_backwards(stage=1)


def gradient_penalty() -> None:
    engine = engine_of(mlp(), 3)
    x = batch()
    (slope,) = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
    engine.backward(slope.pow(2).sum())


def no_sync() -> None:
    engine = engine_of(mlp(), 2)
    with engine.no_sync():
        engine.backward(engine(batch()).sum())


def no_block() -> None:
    engine = engine_of(mlp(), 2)
    with engine.coalesce_grad_reduction():
        engine.backward(engine(batch()).sum())


class Cached(torch.autograd.Function):
    """The backwards of the parts run in the backward of the loss, as in cached losses."""

    @staticmethod
    def forward(ctx: Any, engine: Any, loss: torch.Tensor) -> torch.Tensor:
        ctx.engine = engine
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        for _ in range(2):
            with torch.enable_grad():
                ctx.engine(batch()).sum().backward()
        return None, grad


def cached_loss() -> None:
    engine = engine_of(mlp(), 2)
    engine.backward(Cached.apply(engine, torch.ones((), requires_grad=True)))


def plain_backward_at_stage_0() -> None:
    engine = engine_of(mlp(), 0)
    engine(batch()).sum().backward()


def scale() -> None:
    engine = engine_of(mlp(), 2)
    engine.scale(engine(batch()).sum()).backward()


def gradient_at_an_output() -> None:
    engine = engine_of(mlp(), 2)
    out = engine(batch())
    torch.autograd.grad(out.sum(), out, retain_graph=True)


class Block(nn.Module):
    """A frozen base and small trained adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64).requires_grad_(False)
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.down = nn.Linear(64, 2, bias=False)
        self.up = nn.Linear(2, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return functional.relu(self.base(x)) + self.up(self.down(x))


class Adapted(nn.Module):
    """Its blocks are recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def recomputed_adapters() -> None:
    engine = engine_of(Adapted(), 3)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 64, requires_grad=True)).sum())
        engine.step()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def generation_without_hooks() -> None:
    """What TRL and Accelerate did around generate(), which calls what the root holds."""
    engine = engine_of(Inner(), 3)
    offload = engine.optimizer.parameter_offload
    for _ in range(3):
        engine.backward(engine(batch()).sum())
        engine.step()
        for param in engine.module.parameters():
            param.ds_active_sub_modules.clear()
        for hook in offload.forward_hooks + offload.backward_hooks:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        offload._register_deepspeed_module(engine.module)
        with torch.no_grad():
            engine.module.model(batch())


def inference_mode() -> None:
    engine = engine_of(mlp(), 3)
    engine.backward(engine(batch()).sum())
    engine.step()
    with torch.inference_mode():
        engine(torch.ones(2, 8))
    engine.backward(engine(batch()).sum())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def inference_mode_over_a_sum() -> None:
    engine = engine_of(nn.Sequential(Scale(), nn.ReLU(), Scale()), 3)
    for _ in range(2):
        engine.backward(engine(batch()).sum())
        engine.step()
        with torch.inference_mode():
            engine(torch.ones(2, 8))


def saved_module() -> None:
    """A copy of a module that ZeRO-3 has had in hand, as PEFT's modules_to_save is one."""
    model = mlp()
    engine_of(model, 3)
    copied = nn.Linear(8, 8)
    vars(copied).update({k: v for k, v in vars(model[0]).items() if k.endswith("bwd_fn")})
    engine = engine_of(nn.Sequential(copied, nn.ReLU()), 3)
    engine.backward(engine(batch()).sum())


def removed_section() -> None:
    engine_of(mlp(), 1, elasticity={"enabled": False})


def split_view() -> None:
    engine = engine_of(mlp(), 1)
    engine.backward(engine(batch()).sum())
    engine.step()


def what(script: str) -> str:
    """What Python says of it, without the folders of this machine."""
    try:
        globals()[script]()
    except Exception:
        text = _FOLDERS.sub('File "/env/', traceback.format_exc()).replace(
            f"{ROOT}/", "/home/user/"
        )
        return "".join(f"[rank{dist.get_rank()}]: {line}\n" for line in text.splitlines())
    raise AssertionError(f"{script} raises nothing with DeepSpeed {deepspeed.__version__}")


if __name__ == "__main__":
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    for script in sys.argv[1:]:
        said = what(script)
        if dist.get_rank() == 0:
            file = SAID / f"{deepspeed.__version__}-{script}.txt"
            file.write_text(said, encoding="utf-8")
