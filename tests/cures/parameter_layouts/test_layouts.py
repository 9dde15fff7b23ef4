"""Parameters of no dimensions, and those that do not lie in one piece: all ranks get them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness import EngineTrainer, applied, build_engine, check, parameters, stock
from tests.harness.models import TwoHeads, loss_of
from tests.harness.models.shapes import WIDTH
from tests.harness.options import BF16, OFFLOADED, PERSISTENT, Given, Options
from tests.scripts.ordinary import micro_steps
from tests.world import World, on_ranks

PATCH = "parameter_layouts"
pytestmark = [stock.since("0.19.8", "a broadcast of bytes"), pytest.mark.core_case]


class Scaled(TwoHeads):
    """CLIP's ``logit_scale``, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, tokens: Tensor) -> Any:
        return self.heads(self.trunk(tokens) * self.scale.exp() / self.frozen)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("more", [{}, BF16, OFFLOADED], ids=str)
def test_training(world: World, stage: int, more: Given) -> None:
    options = Options(stage, model=Scaled, micro_steps=2, **more)
    check(world, micro_steps, options, PATCH, "accumulation")


class Layouts(nn.Module):
    """All that a parameter can be, of other values on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.around = torch.rand(4, 8)
        pieces = {
            "scalar": torch.rand(()),
            "frozen": torch.rand(()).bfloat16(),
            "count": torch.tensor(5 + dist.get_rank()),
            "small": torch.rand(()).to(torch.float8_e4m3fn),
            "complex": torch.rand((), dtype=torch.complex64),
            "images": torch.rand(4, 2, 3, 3).to(memory_format=torch.channels_last),
            "points": torch.rand(4, 2, 1, 1).to(memory_format=torch.channels_last),
            "turned": torch.rand(3, 4).t(),
            "bytes": torch.randint(9, (3, 4), dtype=torch.uint8).t(),
            "moved": torch.rand(2, 3, 4).permute(1, 0, 2),
            "every_second": torch.rand(10)[::2],
            "one": torch.rand(10)[::5][:1],
            "part": self.around[:, 2:6],
            "none": torch.empty(0, 4).t(),
            "plain": torch.rand(3),
        }
        for name, piece in pieces.items():
            trains = piece.dtype == torch.float32
            self.register_parameter(name, nn.Parameter(piece, requires_grad=trains))


@on_ranks
@pytest.mark.parametrize("alike", [True, False])
def test_an_engine_sends_all_and_leaves_each_where_it_lies(alike: bool) -> None:
    torch.manual_seed(dist.get_rank())
    model = Layouts()
    if not alike and dist.get_rank():
        model.turned.data = torch.rand(4, 3)
    beside = model.around[:, :2].clone()
    before = {name: (param, param.data) for name, param in model.named_parameters()}
    with applied(PATCH):
        build_engine(model, Options(0).config)
    for name, param in model.named_parameters():
        assert param is before[name][0]
        assert param.data.is_set_to(before[name][1]), name
        own = param.detach().clone(memory_format=torch.contiguous_format).view(-1)
        theirs = own.view(torch.uint8).clone()
        dist.broadcast(theirs, 0)
        assert theirs.equal(own.view(torch.uint8)), name
    assert model.around[:, :2].equal(beside)


@on_ranks
def test_what_is_expanded_is_left_to_stock() -> None:
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(torch.rand(3, 1).expand(3, 4))
    with applied(PATCH), pytest.raises(RuntimeError, match="stride"):
        build_engine(model, Options(0).config)


class Transposed(TwoHeads):
    """As a weight that transformers' ``Conv1D`` has."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.rand(3, WIDTH).t())

    def forward(self, tokens: Tensor) -> Any:
        x = self.trunk(tokens)
        return self.heads(x + (x @ self.own).sum(1, keepdim=True))


def apply(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        param.data.fill_(1.0 + dist.get_rank())


class Applied(Scaled):
    """As transformers' models initialise their weights; a part has no dimensions, and rests."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Scaled()
        self.apply(apply)


def in_init(kind: Any, options: Options) -> None:
    """A model made in `zero.Init`, of other values on each rank; gathered, changed and trained."""
    import deepspeed
    from deepspeed.runtime.zero import GatheredParameters

    torch.manual_seed(dist.get_rank())
    with applied(PATCH):
        with deepspeed.zero.Init(config_dict_or_path=options.config):
            model = kind()
        own = nn.Module.apply
        assert {p.numel() for p in model.parameters()} == {0}
        gathered = parameters(model)
        for name, value in gathered.items():
            wanted = value.clone()
            dist.broadcast(wanted, 0)
            assert wanted.equal(value), name
            assert kind is not Applied or value.eq(1.0).all(), name
        params = [*model.parameters()]
        with GatheredParameters(params, modifier_rank=1):
            shapes = [p.shape for p in params]
            for param in params:
                param.data.fill_(0.1 * dist.get_rank())
        assert shapes == [p.ds_shape for p in params]
        for name, value in parameters(model).items():
            assert (value - 0.1).abs().max() < 1e-3, name
        trainer = EngineTrainer(build_engine(model, options.config), options)
        trainer.backward(loss_of(trainer, 0))
        trainer.step()
        assert nn.Module.apply is own


@pytest.mark.parametrize("more", [{}, BF16, {"zero": PERSISTENT}], ids=str)
@pytest.mark.parametrize("kind", [Scaled, Transposed, Applied])
def test_zero_init(world: World, kind: Any, more: Given) -> None:
    world.run(in_init, kind, Options(3, **more))
