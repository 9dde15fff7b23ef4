"""A pattern by DeepCompile, and by eager ZeRO-3 or plain PyTorch: how far apart they end."""

import logging
import os
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import ds_patches
from tests.dc_fallback import patterns, test_training
from tests.dc_fallback.loops import loop
from tests.harness import BF16, Options, Outcome, Parameters, Script, models
from tests.harness.surroundings import build_engine, compile_engine
from tests.harness.trainers import EngineTrainer, PlainTrainer, worst_difference
from tests.scripts import declared, deepcompile

WIDTH = 64
STEPS = 8  # DeepCompile compiles again at the sixth
NEAR = 0.02  # of a parameter's update norm: eager ZeRO-3 in bfloat16 is no nearer to itself


@dataclass
class Held:
    """DeepCompile's results against eager ZeRO-3's; of pairs, eager's first."""

    losses: tuple[list[float], list[float]] = ([], [])
    norms: dict[str, tuple[float, float]] = field(default_factory=dict)  # of all updates
    apart: dict[str, float] = field(default_factory=dict)  # relative distance of the updates
    available: list[list[str]] = field(default_factory=list)
    skipped: tuple[int, int] = (0, 0)
    peaks: tuple[int, int] = (0, 0)  # bytes, from the first step on
    error: str = ""

    @property
    def wrong(self) -> dict[str, tuple[float, float]]:
        return {
            name: (eager, ours)
            for name, (eager, ours) in self.norms.items()
            if not abs(ours - eager) <= NEAR * eager
        }

    @property
    def untrained(self) -> list[str]:
        return [name for name, (eager, ours) in self.norms.items() if ours < 0.1 * eager]


def deep_compiled(start: nn.Module, config: dict[str, Any], patch: bool = True) -> Any:
    """An engine under DeepCompile itself, for a copy of this model. Runs on every rank."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    _measuring_once()
    if patch:
        ds_patches.apply("dc_fallback")
    return compile_engine(deepcopy(start), config, "inductor")


class Trainer(EngineTrainer):
    """Keeps its losses, and reads the fp32 parameters."""

    def __init__(self, engine: Any, options: Options) -> None:
        super().__init__(engine, options)
        self.losses: list[float] = []

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        super().backward(loss, retain_graph)
        self.losses.append(round(loss.item(), 4))

    def parameters(self) -> Parameters:
        from deepspeed.utils import safe_get_full_fp32_param

        named = self.engine.module.named_parameters()
        return {
            name: safe_get_full_fp32_param(param).float().cpu().clone()
            for name, param in named
            if param.requires_grad
        }


def hold(
    pattern: str,
    *,
    patch: bool = True,
    forwards: int = 1,
    evaluates: bool = False,
    width: int = WIDTH,
    **training: Any,
) -> Held:
    """Train twice from one start. Runs on every rank; `training`: of the options."""
    start = patterns.build(pattern, width)
    options = Options(steps=STEPS, **{**BF16, **training})
    script = partial(loop, forwards=forwards, evaluates=evaluates)
    eager = Trainer(build_engine(deepcopy(start), options.config), options)
    before = eager.parameters()
    peak_eager = _peak_of(script, eager)
    expected, losses = eager.parameters(), eager.losses
    skipped = eager.engine.skipped_steps
    eager.engine.destroy()
    del eager
    try:
        trainer = Trainer(deep_compiled(start, options.config, patch), options)
        peak = _peak_of(script, trainer)
    except Exception as error:
        return Held(error=f"{type(error).__name__}: {error}")
    held = Held(
        losses=(losses, trainer.losses),
        available=trainer.available,
        skipped=(skipped, trainer.engine.skipped_steps),
        peaks=(peak_eager, peak),
    )
    for name, now in trainer.parameters().items():
        eagers, ours = expected[name] - before[name], now - before[name]
        held.norms[name] = (eagers.norm().item(), ours.norm().item())
        if eagers.any():  # no gradient reaches those of a layer without use
            held.apart[name] = ((ours - eagers).norm() / eagers.norm()).item()
    return held


def in_a_row(pattern: str, scripts: Sequence[declared.Script]) -> dict[str, Outcome]:
    """Scripts of tests.scripts.deepcompile with as many micro steps, one after another.

    All by one engine, as it takes a minute until one is compiled. A script begins where the one
    before left the engine's weights, and none follows one that raised, or left something behind.
    Differences are in parts of the largest update. Runs on every rank.
    """
    torch._functorch.config.donated_buffer = False  # which PyTorch asks for to retain a graph
    [micro_steps] = {script.options.micro_steps for script in scripts}
    options = Options(micro_steps=micro_steps, steps=test_training.STEPS)
    start = patterns.build(pattern, WIDTH)
    plain = PlainTrainer(deepcopy(start).to(models.device()), options)
    engine = deep_compiled(start, options.config)
    outcomes: dict[str, Outcome] = {}
    for script in scripts:
        own = script is deepcompile.compiled_parameter_hook  # hooks of its own, which stay
        trainer = EngineTrainer(engine, options, strict=not own)
        outcome = outcomes[script.name] = Outcome(tolerance=1e-4)
        origin = plain.parameters()
        script(plain)
        expected = plain.parameters()
        try:
            script(trainer)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"[:300]
            break
        ends = trainer.parameters()
        largest, _ = worst_difference(expected, origin)
        difference, outcome.where = worst_difference(ends, expected)
        outcome.difference, outcome.moved = difference / largest, 1.0
        print(f"exact {pattern} {script.name} {outcome}", flush=True)  # should the next one abort
        plain.module.load_state_dict(ends)
    return outcomes


def repeated(pattern: str, times: int) -> list[str]:
    """Return the values that differ between many steps that change nothing, with one batch."""
    from deepspeed.utils import safe_get_full_grad

    # Inductor sums an embedding's gradient by atomic additions otherwise, in any order.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    engine = deep_compiled(patterns.build(pattern, WIDTH), Options(**BF16).config)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    first: dict[str, torch.Tensor] = {}
    unlike: list[str] = []
    for step in range(STEPS + times):
        loss = engine(*patterns.inputs(0, 0))
        engine.backward(loss)
        values = {"loss": loss.detach().clone()}
        for name, param in engine.module.named_parameters():
            values[name] = safe_get_full_grad(param).clone()
        engine.step()
        if step == STEPS:  # all is compiled
            first = values
        unlike += [f"{name} in run {step}" for name in first if not first[name].equal(values[name])]
    return unlike


def _measuring_once() -> None:
    """Skip DeepCompile's measurements: noise where cases share GPUs, and most of their time."""
    from deepspeed.compile.profilers import comm_profile, graph_profile

    comm_profile.profile_results = [(0, 0.0), (2**31, 0.1)]  # of gathers of up to 2 GB
    interpreter: Any = graph_profile.ProfilingInterpreter.__init__
    interpreter.__defaults__ = (1, 0, *interpreter.__defaults__[2:])  # runs of an operator, warm-up


def _peak_of(script: Script, trainer: Any) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    trainer.train(script)
    return int(torch.cuda.max_memory_allocated() - held)
