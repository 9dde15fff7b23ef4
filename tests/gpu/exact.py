"""Scripts by DeepCompile and by plain PyTorch, in fp32 with SGD: how far apart they end."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch

from tests.dc_fallback import patterns
from tests.dc_fallback.test_patterns import STEPS
from tests.gpu.held import WIDTH, deep_compiled
from tests.scripts import deepcompile
from tests.scripts.declared import Script
from tests.training import models
from tests.training.options import Options
from tests.training.trainers import EngineTrainer, PlainTrainer


@dataclass
class Found:
    """apart: the largest difference, in parts of the largest update; where: of what parameter.

    left: what was left behind at a step.
    """

    apart: float = float("inf")
    where: str = ""
    error: str = ""
    left: str = ""

    @property
    def exact(self) -> bool:
        return not self.error and not self.left and self.apart <= 1e-4


class Trainer(EngineTrainer):
    """Goes on when something is left behind, and keeps what that was."""

    found = ""

    def leaves_nothing(self) -> None:
        try:
            super().leaves_nothing()
        except AssertionError as left:
            self.found = str(left)[:300]


def run(
    pattern: str, scripts: Sequence[Script], patch: bool, backend: str = "inductor"
) -> dict[str, Found]:
    """Scripts of tests.scripts.deepcompile with as many micro steps, one after another.

    All by one engine, as it takes a minute until one is compiled. A script begins where the one
    before left the engine's weights, and none follows one that raised. Runs on every rank.
    """
    torch._functorch.config.donated_buffer = False  # which PyTorch asks for to retain a graph
    [micro_steps] = {script.options.micro_steps for script in scripts}
    options = Options(micro_steps=micro_steps, steps=STEPS)
    start = patterns.build(pattern, WIDTH)
    plain = PlainTrainer(deepcopy(start).to(models.device()), options)
    trainer = Trainer(deep_compiled(start, options.config, patch, backend), options)
    found: dict[str, Found] = {}
    for script in scripts:
        one = found[script.name] = _held(script, plain, trainer)
        print(f"exact {pattern} {script.name} {one}", flush=True)  # should the next one abort
        if one.error:
            break
        plain.module.load_state_dict(trainer.parameters())
    return found


def _held(script: Script, plain: PlainTrainer, trainer: Trainer) -> Found:
    origin = plain.parameters()
    script(plain)
    expected = plain.parameters()
    trainer.found = ""
    trainer.note()
    try:
        script(trainer)
        parameters = trainer.parameters()
    except Exception as error:
        return Found(error=f"{type(error).__name__}: {error}"[:300])
    largest = max(float((expected[n] - origin[n]).abs().max()) for n in expected)
    apart = {n: float((parameters[n] - expected[n]).abs().max()) / largest for n in expected}
    where = max(apart, key=apart.__getitem__)
    own = script is deepcompile.compiled_parameter_hook  # hooks of its own, which stay
    return Found(apart[where], where, left="" if own else trainer.found)
