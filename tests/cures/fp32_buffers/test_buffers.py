"""Buffers of a model of our own: what the engine and `zero.Init` leave of them."""

from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.harness import Options, applied, build_engine, half_precision_allowed, listening, stock
from tests.world import World, on_ranks

#: The engine casts the whole module, with its buffers (pull request 8066).
ENGINE_CASTS = stock.Version("0.19.2") > stock.RELEASE
FP32 = ("fp32_buffers",)
WIDTH, LENGTH = 8, 1024
HALF = "bfloat16"


class Inner(nn.Module):
    def __init__(self, shared: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("shared", shared)
        self.register_buffer("part", shared[1:3], persistent=False)
        self.register_buffer("narrow", torch.ones(2, dtype=torch.float16))
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("none", None)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float32))
        table = torch.arange(LENGTH, dtype=torch.float32) / 3
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("bias", torch.full((4,), 0.1, dtype=torch.float32))
        self.register_buffer("exact", torch.full((4,), 0.1, dtype=torch.float64))
        self.register_buffer("mask", torch.zeros(4))
        self.inner = Inner(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.linear(x) * self.weight + self.table[:WIDTH].sin().to(x.dtype)
        return turned + self.bias.sum().to(x.dtype)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_buffers(remove_duplicate=False)
    return {name: buffer.clone() for name, buffer in named}


def same(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of those that differ, in dtype or in value."""
    assert actual.keys() == wanted.keys()
    return [
        name
        for name, buffer in wanted.items()
        if actual[name].dtype != buffer.dtype or not actual[name].equal(buffer)
    ]


def trained(model: nn.Module, options: Options) -> Any:
    engine = build_engine(model, options.config)
    engine.backward(engine(torch.ones(6, WIDTH, dtype=options.torch_dtype)).float().pow(2).mean())
    engine.step()
    return engine


def made_in_init(kind: type[nn.Module], options: Options) -> nn.Module:
    torch.manual_seed(3)
    with deepspeed.zero.Init(config_dict_or_path=options.config, enabled=options.stage == 3):
        return kind()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def differing(options: Options, *patches: str) -> tuple[list[str], list[str]]:
    """Names of the buffers that an engine, after a step, has otherwise; what was said."""
    model = Tables()
    wanted = buffers(model)
    with applied(*patches), half_precision_allowed(), listening() as warnings:
        trained(model, options)
    if patches:
        assert model.inner.shared is model.bias
        assert model.inner.part.data_ptr() == model.bias[1:].data_ptr()
    return same(buffers(model), wanted), warnings


@pytest.mark.core_case(stage=2, offload=())
@pytest.mark.parametrize(
    ("stage", "dtype", "offload"),
    [
        *((stage, HALF, ()) for stage in (0, 2, 3)),
        *((stage, "float16", ()) for stage in (1, 2)),
        (2, HALF, ("optimizer",)),
        (3, HALF, ("optimizer", "param")),
    ],
)
def test_buffers_stay(world: World, stage: int, dtype: str, offload: tuple[str, ...]) -> None:
    options = Options(stage, dtype=dtype, offload=offload)
    (wrong, warnings), (other, silent) = world.run(differing, options, *FP32)
    assert wrong == other == silent == []
    assert len(warnings) == ENGINE_CASTS
    for line in warnings:
        assert "would cast them: table, bias, exact and " in line
        assert "_SKIP=fp32_buffers" in line


@on_ranks
def test_what_the_script_wishes() -> None:
    """No half precision, or half precision of all."""
    with applied(*FP32), listening() as warnings:
        build_engine(model := Tables(), Options(2).config)
        assert not same(buffers(model), buffers(Tables()))
        engine = build_engine(Tables().bfloat16(), Options(2, dtype=HALF).config)
        assert engine.module.table.dtype == torch.bfloat16
        assert not warnings


def statistics(stage: int, *patches: str) -> Any:
    """Return BatchNorm's buffers after a step, or PyTorch's error."""
    options = Options(stage, dtype=HALF)
    with applied(*patches):
        model = made_in_init(Normed, options)
        try:
            trained(model, options)
        except RuntimeError as error:
            return str(error)
        return [buffer.tolist() for buffer in buffers(model).values()]


@on_ranks
@pytest.mark.core_case
@pytest.mark.parametrize("stage", [2, 3])
def test_batch_norm_trains_as_on_stock(stage: int) -> None:
    """PyTorch refuses fp32 statistics beside half weights: from 0.19.2 on so does stock."""
    patched = statistics(stage, *FP32)
    assert patched == statistics(stage)
    assert ("expected scalar type" in patched) == (not ENGINE_CASTS and stage == 2)


@pytest.mark.core_case(dtype=HALF)
@pytest.mark.parametrize("dtype", [HALF, "float16"])
def test_zero_init_makes_what_the_model_names(world: World, dtype: str) -> None:
    wanted = buffers(Tables())
    cast, before, _ = world.run(in_init, dtype)[0]
    assert cast["table"].dtype == getattr(torch, dtype), "stock casts no more"
    patched, after, warnings = world.run(in_init, dtype, *FP32)[0]
    assert same(patched, wanted) == ["mask"], "what names no dtype is as on stock"
    assert patched["mask"].dtype == cast["mask"].dtype
    assert same(after, before) == [], "before a step"
    assert len(warnings) == 1
    assert "table" in warnings[0]


def in_init(dtype: str, *patches: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Buffers after a step, parameters from a seed before it, and what was said."""
    options = Options(3, dtype=dtype)
    with applied(*patches), half_precision_allowed(), listening() as warnings:
        params = weights(model := made_in_init(Tables, options))
        trained(model, options)
        assert all(param.dtype == options.torch_dtype for param in weights(model).values())
        return buffers(model), params, warnings
