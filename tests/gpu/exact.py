"""A script by DeepCompile and by plain PyTorch, in fp32 with SGD: how far apart they end."""

from __future__ import annotations

import logging
import warnings
from copy import deepcopy
from dataclasses import dataclass

import torch

import ds_patches
from tests.dc_fallback import cases, patterns, scripts
from tests.gpu.held import WIDTH
from tests.zero3_retain import trainers


@dataclass
class Found:
    """apart: the largest difference, in parts of the largest update; where: of what parameter."""

    apart: float = float("inf")
    where: str = ""
    error: str = ""


def run(pattern: str, name: str, patch: bool) -> Found:
    """`name`: of tests.dc_fallback.scripts. Runs on every rank."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch._functorch.config.donated_buffer = False  # which PyTorch asks for to retain a graph
    script, micro_steps = scripts.ALL[name]
    start = patterns.build(pattern, WIDTH)
    device = torch.device("cuda", torch.cuda.current_device())
    plain = trainers.PlainTrainer(deepcopy(start).to(device), micro_steps)
    origin = plain.parameters()
    script(plain)
    expected = plain.parameters()
    if patch:
        ds_patches.apply("dc_fallback")
    try:
        settings = trainers.config(3, micro_steps=micro_steps)
        trainer = trainers.EngineTrainer(cases.engine_of(start, settings, "inductor"))
        script(trainer)
        found = trainer.parameters()
    except Exception as error:
        return Found(error=f"{type(error).__name__}: {error}"[:300])
    largest = max(float((expected[n] - origin[n].to(device)).abs().max()) for n in expected)
    apart = {n: float((found[n].to(device) - expected[n]).abs().max()) / largest for n in expected}
    where = max(apart, key=apart.__getitem__)
    return Found(apart[where], where)
