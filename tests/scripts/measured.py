"""One script, run one way: how far it ends from plain PyTorch, what it held, what it called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn import functional

from tests.listening import listening
from tests.scripts import declared, models
from tests.scripts.surroundings import around, build_engine, nothing_compiled
from tests.scripts.trainers import STEPS, EngineTrainer, PlainTrainer
from tests.zero3_retain import trainers
from tests.zero3_retain.cases import half_precision_allowed

STOCK, PATCHED = "stock", "patched"
#: Steps that come after the others, for memory alone.
LOOKED_AT = 2
#: ZeRO-3 keeps nothing for its next use and gathers nothing ahead: what else it holds is seen.
FRUGAL = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


@dataclass
class Measured:
    """What one rank saw."""

    error: str = ""
    difference: float = float("inf")  # largest, over all parameters
    where: str = ""
    moved: float = 0.0  # how far plain PyTorch went
    said: list[str] = field(default_factory=list)  # warnings of the patches
    races: list[str] = field(default_factory=list)
    left: list[list[str]] = field(default_factory=list)  # gathered after each backward
    peaks: list[int] = field(default_factory=list)  # elements gathered, most in each step
    calls: int = 0  # of Python functions, in the last step


def measure(reference: str, stage: int, way: str, folder: str) -> Measured:
    """Run a script by plain PyTorch and by an engine; any exception of the engine's is noted."""
    script = declared.find(reference)
    _be(way)
    start = models.build(script.model)
    origin = {name: p.detach().float().clone() for name, p in start.named_parameters()}
    found = Measured()
    with ExitStack() as stack:
        stack.enter_context(_linear_put_back())
        if script.muon:
            stack.enter_context(nothing_compiled())
        if "fp16" in script.settings:
            stack.enter_context(half_precision_allowed())
        expected = _plainly(script, start)
        found.moved = trainers.worst_difference(expected, origin)[0]
        inside = stack.enter_context(around(script.on))
        found.said = stack.enter_context(listening())
        try:
            _train(script, stage, start, Path(folder), inside, found, expected)
        except Exception as error:
            found.error = f"{type(error).__name__}: {error}"
    return found


def prepare(reference: str, stage: int, way: str, folder: str) -> None:
    """What another process does before a script."""
    script = declared.find(reference)
    _be(way)
    assert script.before is not None
    trainer = _engine_trainer(script, stage, models.build(script.model), Path(folder))
    script.before(trainer)


def _be(way: str) -> None:
    """Have every patch applied, or be sure that none is; a process is one or the other."""
    import ds_patches

    if way == PATCHED:
        ds_patches.apply_all()
    live = [name for name in ds_patches.names() if ds_patches.is_applied(name)]
    assert bool(live) == (way == PATCHED), live


def _plainly(script: declared.Script, start: nn.Module) -> trainers.Parameters:
    clip = script.settings.get("gradient_clipping", 0.0)
    trainer = PlainTrainer(deepcopy(start), script.micro_steps, clip, script.muon)
    if script.before is not None:
        script.before(trainer)
    script.run(trainer)
    return trainer.parameters()


def _engine_trainer(
    script: declared.Script, stage: int, start: nn.Module, folder: Path
) -> EngineTrainer:
    def make() -> Any:
        settings = deepcopy(dict(script.settings))
        settings["zero"] = FRUGAL | settings.get("zero", {})
        wanted = trainers.config(stage, micro_steps=script.micro_steps, **settings)
        return build_engine(script, deepcopy(start), wanted)

    trainer = EngineTrainer(make(), make)
    trainer.folder = folder
    return trainer


def _train(
    script: declared.Script,
    stage: int,
    start: nn.Module,
    folder: Path,
    inside: Callable[[], Any],
    found: Measured,
    expected: trainers.Parameters,
) -> None:
    trainer = _engine_trainer(script, stage, start, folder)
    found.left = trainer.left
    trainer.around_step = _counting(found)
    with inside() as races:
        script.run(trainer)
    found.races = races or []
    ends = trainer.parameters()
    found.difference, found.where = trainers.worst_difference(ends, expected)
    if stage == 3 and script.on == declared.EAGER and script.before is None:
        _look_at_memory(script, trainer, found)


def _counting(found: Measured) -> Callable[[int], Any]:
    """Count the calls of Python functions in the last step, which is warm."""

    def count(frame: Any, event: str, argument: Any) -> None:
        found.calls += event == "call"

    @contextmanager
    def around_step(step: int) -> Iterator[None]:
        if step == STEPS - 1:
            sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)

    return around_step


def _look_at_memory(script: declared.Script, trainer: EngineTrainer, found: Measured) -> None:
    """Go on for some steps, with hooks that see how much is gathered."""

    def look(*_: Any) -> None:
        elements = sum(
            param.ds_numel
            for param in trainer.module.parameters()
            if param.ds_status.name != "NOT_AVAILABLE"
        )
        found.peaks[-1] = max(found.peaks[-1], elements)

    for module in trainer.module.modules():
        module.register_forward_pre_hook(look)
        module.register_full_backward_hook(look)

    @contextmanager
    def around_step(step: int) -> Iterator[None]:
        found.peaks.append(0)
        yield
        look()

    trainer.around_step, trainer.count = around_step, LOOKED_AT
    script.run(trainer)


@contextmanager
def _linear_put_back() -> Iterator[None]:
    """ZeRO-3 leaves a Linear of its own behind, which would count in later scripts, or not."""
    before = functional.linear
    try:
        yield
    finally:
        functional.linear = before
