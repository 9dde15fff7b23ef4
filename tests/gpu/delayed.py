"""An engine on streams that are late where a race would need them to be. Runs on every rank."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from tests.harness import EngineTrainer, Options, Parameters, Script, applied, build_engine
from tests.stream_safety import on_streams

CYCLES = 50_000_000  # about 25 ms: far more than a whole backward takes


class Trainer(EngineTrainer):
    """Has its batches on the device from the start: the host would wait for a copy, and for all
    that is late before it."""

    def __init__(self, engine: Any, options: Options) -> None:
        super().__init__(engine, options)
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
    whole = optimizer.gradient_reduction_w_predivide  # where "reduce_scatter" is off
    optimizer.gradient_reduction_w_predivide = _after_a_while(whole)


def late_partitions(engine: Any) -> None:
    """At stage 3: what is put into a bucket is copied there late, behind a reduction."""
    optimizer, name = engine.optimizer, "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
    setattr(optimizer, name, _after_a_while(getattr(optimizer, name)))


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
    *_, last = engine.module.parameters()
    last.register_hook(lambda grad: torch.cuda._sleep(CYCLES))


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
    *,
    patched: bool = False,
    late: str = "",
    aside: bool = False,
    script: Script = on_streams.steps,
    model: Callable[[], torch.nn.Module] = on_streams.model,
    micro_steps: int = 1,
    beside: tuple[str, ...] = (),
    settings: dict[str, Any] | None = None,
    **zero: Any,
) -> Parameters:
    """The parameters after some steps.

    late: one of the functions above. aside: all of it on a stream of the program's own.
    """
    wanted = {**on_streams.OVERLAPPED, **zero}
    options = Options(stage, micro_steps=micro_steps, zero=wanted, settings=settings or {})
    with applied(*("stream_safety",) * patched, *beside):
        trainer = Trainer(build_engine(model(), options.config), options)
        if late:
            globals()[late](trainer.engine)
            trainer.note()  # its hooks may stay
        with _aside() if aside else nullcontext():
            trainer.train(script)
        torch.cuda.synchronize()
        ends = {name: param.cpu() for name, param in trainer.parameters().items()}
        trainer.engine.destroy()
    return ends


def against_no_overlap(
    stage: int, times: int = 1, within: float = 0.0, **options: Any
) -> list[list[str]]:
    """Names of what is unlike, by more than `within`, in each run; a NaN is.

    It is held against the same training without overlap, where nothing is late.
    """
    same = ("beside", "script", "model", "micro_steps")
    plain = {name: options[name] for name in same if name in options}
    expected = train(stage, overlap_comm=False, **plain)
    runs = [train(stage, **options) for _ in range(times)]
    return [
        [
            name
            for name, weight in expected.items()
            if not torch.allclose(run[name], weight, rtol=0.0, atol=within)
        ]
        for run in runs
    ]
