"""One script by an engine and by plain PyTorch, from one start: the outcome, and a check of it."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

import ds_patches
from tests.harness import leftovers, models, stock, surroundings
from tests.harness.groups import grid
from tests.harness.options import Options
from tests.harness.surroundings import DEEPCOMPILE, EAGER, around, build_engine, compile_engine
from tests.harness.trainers import EngineTrainer, Parameters, PlainTrainer, worst_difference
from tests.listening import listening
from tests.world import World

Script = Callable[..., None]
#: DeepSpeed's methods that reduce a bucket, at stages 1 and 2, and at 3.
REDUCE = ("reduce_ipg_grads", "__reduce_and_partition_ipg_grads")
#: Steps that come after the others, for memory alone.
LOOKED_AT = 2


@dataclass
class Outcome:
    """The result of an engine, compared with plain PyTorch from the same start."""

    error: str = ""
    difference: float = float("inf")  # largest, over all parameters
    where: str = ""
    moved: float = 0.0  # how far plain PyTorch went
    tolerance: float = 1e-6
    untrained: list[str] = field(default_factory=list)  # moved there, and not here
    said: list[str] = field(default_factory=list)  # warnings of the patches
    races: list[str] = field(default_factory=list)
    left: list[list[str]] = field(default_factory=list)  # gathered after each backward
    available: list[list[str]] = field(default_factory=list)  # of these, without being entitled
    peaks: list[int] = field(default_factory=list)  # elements gathered, most in each step
    calls: int = 0  # of Python functions, in the last step
    reductions: int = 0  # of reduce buckets, in the last step
    forwards: int = 0  # of plain PyTorch, in the last step

    @property
    def equal(self) -> bool:
        # A script that moves nothing would be right whatever happens.
        moves = self.moved > max(1e-3, 4 * self.tolerance)
        return moves and not self.error and self.difference <= self.tolerance


@contextmanager
def applied(*patches: str) -> Iterator[None]:
    """Patches applied for the length of a block, and really live in it."""
    for patch in reversed(patches):
        ds_patches.apply(patch)
    assert all(map(ds_patches.is_applied, patches))
    try:
        yield
    finally:
        ds_patches.unapply_all()


def run(script: Script, options: Options, *patches: str, **how: Any) -> Outcome:
    """Any script; an exception of the engine's is an outcome. Runs on every rank.

    patches: none for stock. how: as `measure` has it.
    """
    return measure(script, options, applied(*patches), **how)


def check(
    world: World, script: Script, options: Options, *patches: str, quiet: bool = True, **how: Any
) -> list[Outcome]:
    """The script ends where plain PyTorch does on every rank; quiet: and nothing is said."""
    stock.needs_style(options.style)
    outcomes = world.run(run, script, options, *patches, **how)
    for outcome in outcomes:
        assert outcome.equal, outcome
        assert not (quiet and outcome.said), outcome.said
    return outcomes


def measure(
    script: Script,
    options: Options,
    around_engine: AbstractContextManager[Any] | None = None,
    *,
    on: str = EAGER,
    tolerance: float = 0.0,
    strict: bool = True,
    before: Script | None = None,
    folder: str = "",
    looks: Sequence[str] = (),
    compiles: Mapping[str, Any] | None = None,
    engine: type[EngineTrainer] = EngineTrainer,
) -> Outcome:
    """Train twice.

    before: what plain PyTorch does first, and another process has done for the engine.
    looks: "calls", "memory": what else is looked at. compiles: what DeepCompile's stand-in is told.
    """
    start = models.build(options.model, options.torch_dtype)
    origin = {name: p.detach().float().clone() for name, p in start.named_parameters()}
    outcome = Outcome(tolerance=tolerance or options.tolerance)
    with ExitStack() as stack:
        stack.enter_context(_put_back())
        if options.muon:
            # Its own functions are compiled, which takes longer than all scripts.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if "fp16" in options.config:
            stack.enter_context(surroundings.half_precision_allowed())
        expected = _plainly(script, PlainTrainer(deepcopy(start), options), outcome, before)
        outcome.moved = worst_difference(expected, origin)[0]
        inside = stack.enter_context(around(on, **(compiles or {})))
        outcome.said = stack.enter_context(listening())
        try:
            with around_engine or nullcontext():
                trainer = make_trainer(start, options, on, strict, folder, engine)
                outcome.left, outcome.available = trainer.left, trainer.available
                if "calls" in looks:
                    trainer.around_step = _counting(trainer, outcome)
                with inside() as outcome.races:
                    trainer.train(script)
                ends = trainer.parameters()
                outcome.difference, outcome.where = worst_difference(ends, expected)
                outcome.untrained = _untrained(ends, expected, origin)
                if "memory" in looks:
                    _look_at_memory(script, trainer, outcome)
            left = [] if around_engine is None else leftovers.of_patches(trainer.engine)
            assert not left, f"left after unapply: {left}"
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
    return outcome


def make_trainer(
    start: nn.Module,
    options: Options,
    on: str = EAGER,
    strict: bool = True,
    folder: str = "",
    engine: type[EngineTrainer] = EngineTrainer,
) -> EngineTrainer:
    """An engine for a copy of this model; nothing of it may be changed for that of another."""

    def make() -> Any:
        model, mpu = deepcopy(start), grid() if options.grid else None
        if on == DEEPCOMPILE:
            return compile_engine(model, options.config)
        return build_engine(model, options.config, mpu, options=options)

    trainer = engine(make(), options, make, strict)
    trainer.folder = Path(folder)
    return trainer


def _plainly(
    script: Script, trainer: PlainTrainer, outcome: Outcome, before: Script | None
) -> Parameters:
    if before is not None:
        before(trainer)

    @contextmanager
    def around_step(step: int) -> Iterator[None]:
        so_far = len(trainer.forwards)
        yield
        outcome.forwards = len(trainer.forwards) - so_far

    trainer.around_step = around_step
    trainer.train(script)
    return trainer.parameters()


def _untrained(
    ends: Parameters,
    expected: Parameters,
    origin: Parameters,
) -> list[str]:
    """Names of parameters that should have moved and did not, or only by rounding."""
    return [
        name
        for name, start in origin.items()
        if (ends[name] - start).norm() < 0.1 * (expected[name] - start).norm()
    ]


def _counting(trainer: EngineTrainer, outcome: Outcome) -> Callable[[int], Any]:
    """Count the calls of Python functions in the last step, which is warm."""

    def count(frame: Any, event: str, argument: Any) -> None:
        outcome.calls += event == "call"
        outcome.reductions += event == "call" and frame.f_code.co_name in REDUCE

    @contextmanager
    def around_step(step: int) -> Iterator[None]:
        if step == trainer.count - 1:
            sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)

    return around_step


def _look_at_memory(script: Script, trainer: EngineTrainer, outcome: Outcome) -> None:
    """Go on for some steps, with hooks that see how much is gathered."""

    def look(*_: Any) -> None:
        elements = sum(
            param.ds_numel
            for param in trainer.module.parameters()
            if param.ds_status.name != "NOT_AVAILABLE"
        )
        outcome.peaks[-1] = max(outcome.peaks[-1], elements)

    for module in trainer.module.modules():
        module.register_forward_pre_hook(look)
        module.register_full_backward_hook(look)

    @contextmanager
    def around_step(step: int) -> Iterator[None]:
        outcome.peaks.append(0)
        yield
        look()

    trainer.around_step, trainer.count = around_step, LOOKED_AT
    trainer.train(script)


@contextmanager
def _put_back() -> Iterator[None]:
    """Restore what DeepSpeed sets in modules, which would count in later scripts."""
    from deepspeed.utils import groups

    places = (
        (functional, "linear"),  # ZeRO-3's own
        (groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP"),
        (sys.modules.get("deepspeed.runtime.torch_autocast"), "TORCH_AUTOCAST_INITIALIZED"),
    )
    with ExitStack() as stack:
        for owner, name in (place for place in places if place[0]):
            stack.enter_context(mock.patch.object(owner, name, vars(owner)[name]))
        yield
