"""What an engine trains in: plainly, under DeepCompile's stand-in, or on detected streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

RATE = 0.1
#: How a script is run: by an engine on the CPU, under the stand-in of DeepCompile, or on the
#: streams of the race detector.
EAGER, DEEPCOMPILE, STREAMS = "eager", "deepcompile", "streams"

#: The block in which a script runs; it has the races that were seen, in the end.
Inside = Callable[[], AbstractContextManager[list[str]]]


@contextmanager
def around(on: str, **compiles: Any) -> Iterator[Inside]:
    """`compiles`: what DeepCompile's stand-in is told."""
    if on == DEEPCOMPILE:
        from tests.dc_fallback import stand_in

        with stand_in.deep_compile(**compiles):
            yield _plainly
    elif on == STREAMS:
        from tests.stream_safety.races import detecting

        with detecting() as (device, detector):

            @contextmanager
            def detected() -> Iterator[list[str]]:
                with detector:
                    yield detector.races
                device.synchronize()

            yield detected
    else:
        yield _plainly


@contextmanager
def _plainly() -> Iterator[list[str]]:
    yield []


def trained(model: nn.Module, rates: Sequence[float]) -> list[dict[str, Any]]:
    """A group of parameters for each of these rates of learning."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [{"params": params[at :: len(rates)], "lr": rate} for at, rate in enumerate(rates)]


def build_optimizer(
    model: nn.Module, muon: bool, sharded: bool = False, rates: Sequence[float] = (RATE,)
) -> Any:
    """SGD, or Muon: of one device, or, under ZeRO, one that finds its updates made."""
    if not muon:
        return torch.optim.SGD(trained(model, rates))
    from deepspeed.runtime.zero.muon import muon_optimizer, original_muon

    for name, param in model.named_parameters():
        param.use_muon = param.ndim > 1 and "embed" not in name
    groups = [
        {"params": [p for p in model.parameters() if p.use_muon == whole], "use_muon": whole}
        for whole in (True, False)
    ]
    if sharded:
        return muon_optimizer.MuonWithAuxAdam(groups)
    return original_muon.SingleDeviceMuonWithAuxAdam(groups)


def build_engine(
    model: nn.Module,
    config: dict[str, Any],
    mpu: Any = None,
    *,
    optimizer: Any = None,
    muon: bool = False,
    rates: Sequence[float] = (RATE,),
) -> Any:
    """`mpu`: knows the groups of ranks, where they are not the whole world.

    A configuration may name the optimizer.
    """
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules

    if leaves := getattr(model, "leaf_classes", None):
        set_z3_leaf_modules(model, list(leaves))
    given: dict[str, Any] = {"model_parameters": trained(model, rates)}
    if "optimizer" not in config:
        given = {"optimizer": optimizer or build_optimizer(model, muon, True, rates)}
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu, **given)
    return engine


def compile_engine(model: nn.Module, config: dict[str, Any], backend: str = "eager") -> Any:
    """An engine under DeepCompile."""
    engine = build_engine(model, {**config, "compile": {"deepcompile": True}})
    engine.compile(backend=backend)
    return engine


@contextmanager
def half_precision_allowed() -> Iterator[None]:
    """Let DeepSpeed train in fp16 on a CPU that computes it slowly; its own check says no."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported
