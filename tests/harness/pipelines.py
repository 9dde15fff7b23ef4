"""DeepSpeed's pipeline engine, held against plain PyTorch over the whole batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ds_patches
from tests.harness import Options, Outcome, Parameters, applied, listening, worst_difference
from tests.harness.surroundings import RATE, half_precision_allowed, streams

WIDTH, ROWS = 8, 6


@dataclass(frozen=True)
class Pipeline(Options):
    """The options of one training. `stage` is ZeRO's, and `stages` are the pipeline's.

    tied: the first layer's weight is the last one's too. pair: each layer hands on two tensors.
    checkpointing: each layer is computed again in the backward.
    """

    stage: int = 0
    micro_steps: int = 4
    steps: int = 4
    stages: int = 2
    tied: bool = False
    pair: bool = False
    checkpointing: bool = False

    @property
    def config(self) -> dict[str, Any]:
        more = {"pipeline": {"activation_checkpoint_interval": 1}} if self.checkpointing else {}
        return {**super().config, **more}


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
    layers = layers_of(options)
    if options.tied:
        layers[-1] = layers[0]
    model = nn.Sequential(*layers)
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
    return named(layers, options.tied), losses


def named(layers: Sequence[nn.Module], tied: bool) -> Parameters:
    params = {}
    for index, layer in enumerate(layers):
        for name, param in layer.named_parameters():
            prefix = "tied_modules.ends" if tied and index in (0, len(layers) - 1) else str(index)
            params[f"{prefix}.{name}"] = param.detach().float().clone()
    return params


def build(options: Pipeline) -> Any:
    import deepspeed
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    layers: list[Any] = [*layers_of(options)]
    if options.tied:  # both are built of one, as DeepSpeed wants it
        ends = TiedLayerSpec("ends", Copied, layers[0], tied_weight_attr=["weight", "bias"])
        layers[0] = layers[-1] = ends
    module = PipelineModule(
        layers=layers, num_stages=options.stages, loss_fn=loss_of, partition_method="uniform"
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=options.config)
    return engine


class Copied(Block):
    """A copy of a block, with its weights under other names, which is how tied layers are found."""

    def __init__(self, block: Block) -> None:
        nn.Module.__init__(self)
        copy = deepcopy(block)
        self.linear, self.pair = copy.linear, copy.pair

    @property
    def weight(self) -> nn.Parameter:
        return self.linear.weight

    @property
    def bias(self) -> nn.Parameter:
        return self.linear.bias


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


def train_and_unapply(options: Pipeline, engine: Any) -> list[float]:
    losses = train(options, engine, range(options.steps - 1))
    ds_patches.unapply_all()
    engine.eval_batch(batches(options, engine, 9))
    return losses + train(options, engine, [options.steps - 1])


def run(
    options: Pipeline, *patches: str, script: Callable[[Pipeline, Any], list[float]] = train
) -> Trained:
    """One training on this rank, patched or not; an exception is an outcome."""
    from deepspeed.utils import groups

    outcome = Trained(tolerance=max(options.tolerance, 2e-6))
    expected, outcome.expected = plainly(options, dist.get_world_size() // options.stages)
    start = named(layers_of(options), options.tied)
    with ExitStack() as stack:
        # The grid of a pipeline, which DeepSpeed keeps for all engines that come.
        stack.callback(setattr, groups, "mpu", None)
        if options.dtype == "float16":
            stack.enter_context(half_precision_allowed())
        if options.checkpointing:
            stack.enter_context(streams())
        outcome.said = stack.enter_context(listening())
        try:
            with applied(*patches):
                engine = build(options)
                outcome.losses = script(options, engine)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
            return outcome
    ends = {name: p.detach().float() for name, p in engine.module.named_parameters()}
    own = {name: expected[name] for name in ends}
    outcome.difference, outcome.where = worst_difference(ends, own)
    outcome.moved = worst_difference(own, {name: start[name] for name in ends})[0]
    outcome.ratios = {
        n: ((ends[n] - start[n]).norm() / (own[n] - start[n]).norm()).item() for n in ends
    }
    return outcome
