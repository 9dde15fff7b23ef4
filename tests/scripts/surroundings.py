"""What an engine trains in: plainly, under DeepCompile's stand-in, or on detected streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from tests.scripts.declared import DEEPCOMPILE, STREAMS
from tests.scripts.groups import grid
from tests.zero3_retain.trainers import RATE

MUON = {
    "type": "Muon",
    "params": {"lr": 0.02, "momentum": 0.95, "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0},
}

#: The block in which a script runs; it has the races that were seen, in the end.
Inside = Callable[[], AbstractContextManager[list[str]]]


@contextmanager
def around(on: str) -> Iterator[Inside]:
    if on == DEEPCOMPILE:
        from tests.dc_fallback import stand_in

        with stand_in.deep_compile():
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
def nothing_compiled() -> Iterator[None]:
    """Muon's own functions are, and compiling them takes longer than all scripts."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _plainly() -> Iterator[list[str]]:
    yield []


def plain_optimizer(model: nn.Module, settings: Mapping[str, Any] | None = None) -> Any:
    """SGD, or Muon as its authors have it for a single device."""
    trained = [param for param in model.parameters() if param.requires_grad]
    if "optimizer" not in (settings or {}):
        return torch.optim.SGD(trained, lr=RATE)
    from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuonWithAuxAdam

    named = list(model.named_parameters())
    whole = [param.ndim > 1 and "embed" not in name for name, param in named]
    groups = [
        {"params": [p for (_, p), muon in zip(named, whole, strict=True) if muon == at]}
        | {"use_muon": at, "lr": MUON["params"]["lr"]}
        for at in (True, False)
    ]
    groups[1] |= {"betas": (0.9, 0.95), "eps": 1e-10}
    return SingleDeviceMuonWithAuxAdam(groups)


def build_engine(on: str, model: nn.Module, settings: dict[str, Any]) -> Any:
    import deepspeed

    if on == DEEPCOMPILE:
        settings = {**settings, "compile": {"deepcompile": True}}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=None if "optimizer" in settings else plain_optimizer(model),
        config=settings,
        mpu=grid(),
    )
    if on == DEEPCOMPILE:
        engine.compile(backend="eager")
    return engine
