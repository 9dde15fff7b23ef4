"""What an engine trains in: plainly, under DeepCompile's stand-in, or on detected streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from tests.scripts.declared import DEEPCOMPILE, STREAMS
from tests.scripts.groups import grid

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
def _plainly() -> Iterator[list[str]]:
    yield []


def build_engine(on: str, model: nn.Module, settings: dict[str, Any]) -> Any:
    import deepspeed

    from tests.zero3_retain.trainers import RATE

    trained = [param for param in model.parameters() if param.requires_grad]
    if on == DEEPCOMPILE:
        settings = {**settings, "compile": {"deepcompile": True}}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(trained, lr=RATE),
        config=settings,
        mpu=grid(),
    )
    if on == DEEPCOMPILE:
        engine.compile(backend="eager")
    return engine
