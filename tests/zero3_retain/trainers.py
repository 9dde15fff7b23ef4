"""The same training script, run by DeepSpeed and by plain PyTorch.

A *script* is a function of one trainer: it asks for forwards, backwards, ``zero_grad`` and steps.
Run by :class:`EngineTrainer` it drives a real DeepSpeed engine; run by :class:`PlainTrainer` it is
the reference. Both return the parameters that came of it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import leftovers

RATE = 0.1
#: What accumulation keeps at an engine and its optimizer, beside what others do.
WHILE_APPLIED = leftovers.WHILE_APPLIED | {
    "_ds_patches_accumulation",
    "allreduce_gradients",
    "backward_epilogue",
    "copy_grads_in_partition",
}
Parameters = dict[str, Tensor]


def config(stage: int, *, micro_steps: int | str = 1, **overrides: Any) -> dict[str, Any]:
    """A DeepSpeed configuration with every default that moved between releases pinned."""
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_bucket_size": 500,
        **overrides.pop("zero", {}),
    }
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **overrides,
    }


def build_engine(model: nn.Module, settings: dict[str, Any], mpu: Any = None) -> Any:
    """`mpu`: knows the groups of ranks, where they are not the whole world."""
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules

    if leaves := getattr(model, "leaf_classes", None):
        set_z3_leaf_modules(model, list(leaves))
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(trainable, lr=RATE), config=settings, mpu=mpu
    )
    return engine


class PlainTrainer:
    """Data parallel SGD in plain PyTorch: gradients are averaged over the ranks at the step."""

    def __init__(self, model: nn.Module, micro_steps: int = 1) -> None:
        self.model = model
        self._micro_steps = micro_steps
        self._micro_step = 0

    def forward(self, *inputs: Tensor) -> Any:
        return self.model(*inputs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        (loss / self._micro_steps).backward(retain_graph=retain_graph)

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def step(self) -> None:
        self._micro_step += 1
        if self._micro_step % self._micro_steps:
            return
        with torch.no_grad():
            reached = [param for param in self.model.parameters() if param.grad is not None]
            # All at once: a collective for each costs more than all else that is computed here.
            flat = torch.cat([param.grad.view(-1) for param in reached])
            dist.all_reduce(flat, op=dist.ReduceOp.SUM)
            for param, part in zip(reached, flat.split([p.numel() for p in reached]), strict=True):
                param -= RATE * part.view_as(param) / dist.get_world_size()
        self.model.zero_grad()

    def parameters(self) -> Parameters:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class EngineTrainer:
    """A DeepSpeed engine, driven in one of the three styles of calling backward.

    After each step nothing may be left behind that was not there when the trainer was made.
    """

    def __init__(self, engine: Any, style: str = "engine") -> None:
        self.engine = engine
        self.style = style
        self.available_after_backward: list[list[str]] = []
        self.note()

    def note(self) -> None:
        """What is there now may stay."""
        self._before = leftovers.of(self.engine)

    def leaves_nothing(self) -> None:
        """Raises AssertionError for what is left behind, after a step, a window or a failure."""
        left = leftovers.since(self._before, self.engine, but=WHILE_APPLIED)
        assert not left, left

    def forward(self, *inputs: Tensor) -> Any:
        return self.engine(*inputs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        if self.style == "engine":
            self.engine.backward(loss, retain_graph=retain_graph)
        elif self.style == "scale":
            self.engine.scale(loss).backward(retain_graph=retain_graph)
        else:
            loss.backward(retain_graph=retain_graph)
        self.available_after_backward.append(available(self.engine))

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def step(self) -> None:
        before = self.engine.global_steps
        self.engine.step()
        if self.engine.global_steps > before:  # and no micro step, whose gradients wait
            self.leaves_nothing()

    def parameters(self) -> Parameters:
        return parameters(self.engine.module)


def parameters(module: nn.Module) -> Parameters:
    """All of a model, which ZeRO-3 may have in parts."""
    from deepspeed.runtime.zero import GatheredParameters

    result = {}
    for name, param in module.named_parameters():
        with GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            result[name] = param.detach().float().clone()
    return result


def available(engine: Any) -> list[str]:
    """Names of parameters that are gathered though nothing entitles them to be.

    A parameter that upstream's prefetcher has in flight for the next backward is entitled to it.
    """
    in_flight = getattr(engine.module, "ds_inflight_param_registry", {})
    return [
        name
        for name, param in engine.module.named_parameters()
        if hasattr(param, "ds_id")
        and param.ds_status.name == "AVAILABLE"
        and not param.ds_persist
        and param not in in_flight
    ]


def worst_difference(found: Parameters, expected: Parameters) -> tuple[float, str]:
    """Largest difference over all parameters, relative to each parameter's update scale of 1."""
    assert found.keys() == expected.keys()
    return max(
        ((found[name].float() - expected[name].float()).abs().max().item(), name) for name in found
    )


Script = Callable[[Any], None]


def run_into(
    outcome: Any, script: Script, trainer: Any, expected: Parameters, origin: Parameters
) -> None:
    """Hold what a trainer comes to against what was expected; its exception is an outcome."""
    outcome.moved = worst_difference(expected, origin)[0]
    try:
        script(trainer)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    else:
        found = trainer.parameters()
        outcome.difference, outcome.where = worst_difference(found, expected)


def plain(model: nn.Module, script: Script, micro_steps: int = 1) -> Parameters:
    trainer = PlainTrainer(deepcopy(model), micro_steps)
    script(trainer)
    return trainer.parameters()
