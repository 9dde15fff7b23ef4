"""Scripts by DeepCompile and by plain PyTorch, in fp32 with SGD: how far apart they end."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch

import ds_patches
from tests.dc_fallback import cases, patterns, scripts
from tests.gpu.held import WIDTH
from tests.training import trainers


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


class Trainer(trainers.EngineTrainer):
    """Goes on when something is left behind, and keeps what that was."""

    left = ""

    def leaves_nothing(self) -> None:
        try:
            super().leaves_nothing()
        except AssertionError as left:
            self.left = str(left)[:300]


def run(
    pattern: str, names: Sequence[str], patch: bool, backend: str = "inductor"
) -> dict[str, Found]:
    """Scripts of tests.dc_fallback.scripts with as many micro steps, one after another.

    All by one engine, as it takes a minute until one is compiled. A script begins where the one
    before left the engine's weights, and none follows one that raised. Runs on every rank.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch._functorch.config.donated_buffer = False  # which PyTorch asks for to retain a graph
    [micro_steps] = {scripts.ALL[name][1] for name in names}
    start = patterns.build(pattern, WIDTH)
    device = cases.inputs(0, 0)[0].device
    plain = trainers.PlainTrainer(deepcopy(start).to(device), micro_steps)
    if patch:
        ds_patches.apply("dc_fallback")
    settings = trainers.config(3, micro_steps=micro_steps)
    trainer = Trainer(cases.engine_of(start, settings, backend))
    found: dict[str, Found] = {}
    for name in names:
        found[name] = _held(name, plain, trainer)
        print(f"exact {pattern} {name} {found[name]}", flush=True)  # should the next one abort
        if found[name].error:
            break
        plain.model.load_state_dict(trainer.parameters())
    return found


def _held(name: str, plain: trainers.PlainTrainer, trainer: Trainer) -> Found:
    script, _ = scripts.ALL[name]
    origin = plain.parameters()
    script(plain)
    expected = plain.parameters()
    trainer.left = ""
    try:
        script(trainer)
        parameters = trainer.parameters()
    except Exception as error:
        return Found(error=f"{type(error).__name__}: {error}"[:300])
    largest = max(float((expected[n] - origin[n]).abs().max()) for n in expected)
    apart = {n: float((parameters[n] - expected[n]).abs().max()) / largest for n in expected}
    where = max(apart, key=apart.__getitem__)
    return Found(apart[where], where, left=trainer.left)
