"""An engine on streams that are late where a race would need them to be. Runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from tests.stream_safety import on_streams
from tests.training.options import config
from tests.training.run import applied
from tests.training.surroundings import build_engine
from tests.training.trainers import EngineTrainer, Parameters

CYCLES = 50_000_000  # about 25 ms: far more than a whole backward takes

_LAYER = on_streams.WIDTH**2  # elements of its gradient


class Trainer(EngineTrainer):
    """Has its batches on the device from the start: the host would wait for a copy, and for all
    that is late before it."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._batches = iter([on_streams.batch(number).to(engine.device) for number in range(9)])

    def __call__(self, *inputs: torch.Tensor) -> Any:
        return self.engine(next(self._batches))


def _after_a_while(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose work the current stream gets to only after a while."""

    def late(*args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(CYCLES)
        return function(*args, **kwargs)

    return late


def late_reductions(engine: Any) -> None:
    optimizer = engine.optimizer
    optimizer.allreduce_bucket = _after_a_while(optimizer.allreduce_bucket)


def late_gradients(engine: Any) -> None:
    """Each layer's is handed over on one of three streams, and late on two of them."""
    streams = [None, torch.cuda.Stream(), torch.cuda.Stream()]

    def hand_over(grad: torch.Tensor, stream: Any) -> None:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            grad.record_stream(stream)
            torch.cuda.set_stream(stream)  # until autograd is done with this gradient
            torch.cuda._sleep(CYCLES)

    for number, param in enumerate(engine.module.parameters()):
        param.register_hook(partial(hand_over, stream=streams[number % 3]))


def late_gradients_and_reductions(engine: Any) -> None:
    late_gradients(engine)
    late_reductions(engine)


def late_backward(engine: Any) -> None:
    """The loss is late, on the program's stream, and all that follows from it."""

    def wait(*args: Any) -> None:
        torch.cuda._sleep(CYCLES)

    list(engine.module.parameters())[-1].register_hook(wait)


def late_step(engine: Any) -> None:
    step = engine.optimizer.optimizer
    step.step = _after_a_while(step.step)


def _aside() -> Any:
    """On a stream of the program's own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(side)


def train(
    stage: int,
    parts: str = "",
    *,
    late: Callable[[Any], None] | None = None,
    aside: bool = False,
    script: Callable[..., None] = on_streams.steps,
    micro_steps: int = 1,
    beside: tuple[str, ...] = (),
    settings: dict[str, Any] | None = None,
    **zero: Any,
) -> Parameters:
    """The parameters after some steps. aside: all of it on a stream of the program's own."""
    wanted = {"overlap_comm": True, "reduce_bucket_size": on_streams.BUCKET, **zero}
    given = config(stage, micro_steps=micro_steps, zero=wanted, **(settings or {}))
    with ExitStack() as stack:
        for patch in beside:
            stack.enter_context(applied(patch))
        if parts:
            stack.enter_context(applied("stream_safety", parts=parts))
        trainer = Trainer(build_engine(on_streams.model(), given))
        if late is not None:
            late(trainer.engine)
            trainer.note()  # its hooks may stay
        with _aside() if aside else nullcontext():
            script(trainer, micro_steps=micro_steps)
        torch.cuda.synchronize()
        found = {name: param.cpu() for name, param in trainer.parameters().items()}
        trainer.engine.destroy()
    return found


def unlike(found: Parameters, expected: Parameters) -> list[str]:
    """Names of those that are not equal to the bit; a NaN is not."""
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    """What a run to compare with has of it."""
    return {name: given[name] for name in ("beside", "script", "micro_steps") if name in given}


def against_no_overlap(stage: int, parts: str, late: str = "", **given: Any) -> list[str]:
    """What differs from the same training without overlap, where nothing is late."""
    expected = train(stage, overlap_comm=False, **_plain(given))
    found = train(stage, parts, late=globals()[late] if late else None, **given)
    return unlike(found, expected)


def repeated(stage: int, times: int, **given: Any) -> list[list[str]]:
    """What differs from the run without overlap, in each of many runs with it."""
    expected = train(stage, overlap_comm=False, **_plain(given))
    return [unlike(train(stage, "all", **given), expected) for _ in range(times)]


def host_is_ahead(stage: int, parts: str) -> bool:
    """Whether a backward returns while its reductions are still to come."""
    ahead = []

    def look(trainer: Trainer, micro_steps: int) -> None:
        for step in range(3):
            trainer.backward(trainer(on_streams.batch(step)).square().mean())
            ahead.append(not trainer.engine.optimizer.reduction_stream.query())
            trainer.step()

    train(stage, parts, late=late_reductions, script=look)
    return all(ahead)


def forward_is_ahead(stage: int, parts: str) -> bool:
    """Whether a forward is done while the micro step before it is still reduced."""
    ahead = []

    def look(trainer: Trainer, micro_steps: int) -> None:
        for number in range(3 * micro_steps):
            output = trainer(on_streams.batch(number))
            if number % micro_steps:
                torch.cuda.current_stream().synchronize()
                ahead.append(not trainer.engine.optimizer.reduction_stream.query())
            trainer.backward(output.square().mean())
            trainer.step()

    train(stage, parts, late=late_reductions, script=look, micro_steps=3)
    return all(ahead)


def reduces_before_the_next_gradient(stage: int, parts: str) -> bool:
    """Whether each bucket is, where each gradient is late and fills one."""
    begins: list[torch.cuda.Event] = []
    ready: list[torch.cuda.Event] = []

    def note(kept: list[torch.cuda.Event]) -> None:
        kept.append(torch.cuda.Event(enable_timing=True))
        kept[-1].record()

    def look(engine: Any) -> None:
        optimizer = engine.optimizer
        reduce = optimizer.allreduce_bucket

        def noted(*args: Any, **kwargs: Any) -> Any:
            note(begins)
            return reduce(*args, **kwargs)

        def late(grad: torch.Tensor) -> None:
            torch.cuda._sleep(10 * CYCLES)  # or a busy host may be later still
            note(ready)

        optimizer.allreduce_bucket = noted
        for param in engine.module.parameters():
            param.register_hook(late)

    train(
        stage,
        parts,
        late=look,
        script=partial(on_streams.steps, count=1),
        reduce_bucket_size=_LAYER,
    )
    assert len(begins) == len(ready) == on_streams.LAYERS
    pairs = zip(begins, ready[1:], strict=False)
    return all(begin.elapsed_time(after) > 0 for begin, after in pairs)
