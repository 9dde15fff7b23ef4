"""What an engine trains in: plainly, under DeepCompile's stand-in, or on detected streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from tests.scripts.declared import DEEPCOMPILE, STREAMS, Script
from tests.scripts.groups import grid
from tests.zero3_retain.trainers import RATE

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


def build_optimizer(model: nn.Module, muon: bool, sharded: bool = False) -> Any:
    """SGD, or Muon: of one device, or, under ZeRO, one that finds its updates made."""
    if not muon:
        trained = [param for param in model.parameters() if param.requires_grad]
        return torch.optim.SGD(trained, lr=RATE)
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


def build_engine(script: Script, model: nn.Module, settings: dict[str, Any]) -> Any:
    import deepspeed

    if script.on == DEEPCOMPILE:
        settings = {**settings, "compile": {"deepcompile": True}}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(model, script.muon, sharded=True),
        config=settings,
        mpu=grid(),
    )
    if script.on == DEEPCOMPILE:
        engine.compile(backend="eager")
    return engine
