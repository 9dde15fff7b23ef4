"""DeepSpeed's pipeline engine, held against plain PyTorch over the whole batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import Options, Outcome, Parameters, applied, listening, worst_difference
from tests.harness.surroundings import RATE, half_precision_allowed

WIDTH, ROWS = 8, 6


@dataclass(frozen=True)
class Pipeline(Options):
    """The options of one training. `stage` is ZeRO's, and `stages` are the pipeline's.

    pair: each layer hands on two tensors.
    """

    stage: int = 0
    micro_steps: int = 4
    steps: int = 4
    stages: int = 2
    pair: bool = False


@dataclass
class Trained(Outcome):
    """The outcome of this rank's stage."""

    ratios: dict[str, float] = field(default_factory=dict)  # of updates, by parameter
    losses: list[float] = field(default_factory=list)  # what train_batch() gave, and should have
    expected: list[float] = field(default_factory=list)


class Block(nn.Module):
    def __init__(self, pair: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.pair = pair

    def forward(self, inputs: Any) -> Any:
        if not self.pair:
            return torch.tanh(self.linear(inputs))
        first, second = inputs if isinstance(inputs, tuple) else (inputs, inputs)
        return torch.tanh(self.linear(first)), torch.tanh(self.linear(second)) + first


def layers_of(options: Pipeline) -> list[nn.Module]:
    torch.manual_seed(7)
    return [Block(options.pair).to(options.torch_dtype) for _ in range(4)]


def loss_of(outputs: Any, labels: Tensor) -> Tensor:
    outputs = sum(outputs) if isinstance(outputs, tuple) else outputs
    return F.mse_loss(outputs.float(), labels.float()) * 8


def batch(step: int, rank: int, micro: int, dtype: Any) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10000 * step + 100 * rank + micro)
    inputs, labels = torch.randn(2, ROWS, WIDTH, generator=generator)
    return inputs.to(dtype), labels.to(dtype)


def plainly(options: Pipeline, ranks: int) -> tuple[Parameters, list[float]]:
    """The names of a pipeline's parameters, as they are after all steps; and each step's loss."""
    model = nn.Sequential(*layers_of(options))
    params = list(model.parameters())
    masters = [param.detach().float().clone() for param in params]
    optimizer, losses = torch.optim.SGD(masters, lr=RATE), []
    for step in range(options.steps):
        for master in masters:
            master.grad = torch.zeros_like(master)
        losses.append(0.0)
        for rank, micro in product(range(ranks), range(options.micro_steps)):
            inputs, labels = batch(step, rank, micro, options.torch_dtype)
            loss = loss_of(model(inputs), labels) / (options.micro_steps * ranks)
            losses[-1] += loss.item()
            for master, grad in zip(masters, torch.autograd.grad(loss, params), strict=True):
                master.grad += grad
        if options.clip:
            nn.utils.clip_grad_norm_(masters, options.clip)
        optimizer.step()
        for param, master in zip(params, masters, strict=True):
            param.data.copy_(master)
    return named(model), losses


def named(model: nn.Module) -> Parameters:
    return {name: param.detach().float().clone() for name, param in model.named_parameters()}


def build(options: Pipeline) -> Any:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    how = {"num_stages": options.stages, "loss_fn": loss_of, "partition_method": "uniform"}
    module = PipelineModule(layers=layers_of(options), **how)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=options.config)
    return engine


def batches(options: Pipeline, engine: Any, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    rank = engine.grid.get_data_parallel_id()
    return (batch(step, rank, micro, options.torch_dtype) for micro in range(options.micro_steps))


def train(options: Pipeline, engine: Any, steps: Sequence[int] | None = None) -> list[float]:
    steps = range(options.steps) if steps is None else steps
    return [float(engine.train_batch(batches(options, engine, step))) for step in steps]


def train_and_evaluate(options: Pipeline, engine: Any) -> list[float]:
    losses = []
    for step in range(options.steps):
        engine.eval_batch(batches(options, engine, step + 7))
        losses += train(options, engine, [step])
    return losses


def run(
    options: Pipeline, *patches: str, script: Callable[[Pipeline, Any], list[float]] = train
) -> Trained:
    """One training on this rank, patched or not; an exception is an outcome."""
    from deepspeed.utils import groups

    outcome = Trained(tolerance=max(options.tolerance, 2e-6))
    expected, outcome.expected = plainly(options, dist.get_world_size() // options.stages)
    start = named(nn.Sequential(*layers_of(options)))
    with ExitStack() as stack:
        # The grid of a pipeline, which DeepSpeed keeps for all engines that come.
        stack.callback(setattr, groups, "mpu", None)
        if options.dtype == "float16":
            stack.enter_context(half_precision_allowed())
        outcome.said = stack.enter_context(listening())
        try:
            with applied(*patches):
                engine = build(options)
                outcome.losses = script(options, engine)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
            return outcome
    ends = named(engine.module)
    own = {name: expected[name] for name in ends}
    outcome.difference, outcome.where = worst_difference(ends, own)
    outcome.moved = worst_difference(own, {name: start[name] for name in ends})[0]
    outcome.ratios = {
        n: ((ends[n] - start[n]).norm() / (own[n] - start[n]).norm()).item() for n in ends
    }
    return outcome
