"""An engine on streams that are late where a race would need them to be. Runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from tests.stream_safety import cases
from tests.zero3_retain import trainers
from tests.zero3_retain.cases import applied

CYCLES = 40_000_000  # about 20 ms: far more than a whole backward takes


class Trainer(trainers.EngineTrainer):
    """Brings the batch to its device."""

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.engine(*(one.to(self.engine.device) for one in inputs))


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
    script: Callable[..., None] = cases.steps,
    beside: tuple[str, ...] = (),
    settings: dict[str, Any] | None = None,
    **zero: Any,
) -> trainers.Parameters:
    """The parameters after some steps. aside: all of it on a stream of the program's own."""
    wanted = {"overlap_comm": True, "reduce_bucket_size": cases.BUCKET, **zero}
    config = trainers.config(stage, zero=wanted, **(settings or {}))
    with ExitStack() as stack:
        for patch in beside:
            stack.enter_context(applied(patch))
        if parts:
            stack.enter_context(applied("stream_safety", parts=parts))
        trainer = Trainer(trainers.build_engine(cases.model(), config))
        if late is not None:
            late(trainer.engine)
        with _aside() if aside else nullcontext():
            script(trainer)
        torch.cuda.synchronize()
        found = {name: param.cpu() for name, param in trainer.parameters().items()}
        trainer.engine.destroy()
    return found


def unlike(found: trainers.Parameters, expected: trainers.Parameters) -> list[str]:
    """Names of those that are not equal to the bit; a NaN is not."""
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def against_no_overlap(stage: int, parts: str, late: str = "", **given: Any) -> list[str]:
    """What differs from the same training without overlap, where nothing is late."""
    beside, script = given.get("beside", ()), given.get("script", cases.steps)
    expected = train(stage, beside=beside, script=script, overlap_comm=False)
    found = train(stage, parts, late=globals()[late] if late else None, **given)
    return unlike(found, expected)


def repeated(stage: int, times: int, **given: Any) -> list[list[str]]:
    """S3: what differs from the run without overlap, in each of many runs with it."""
    plain = {name: given[name] for name in ("beside", "script") if name in given}
    expected = train(stage, overlap_comm=False, **plain)
    return [unlike(train(stage, "all", **given), expected) for _ in range(times)]
