"""Scripts by DeepCompile and by plain PyTorch, in fp32 with SGD: how far apart they end."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch

from tests.dc_fallback import patterns
from tests.dc_fallback.test_training import STEPS
from tests.gpu.held import WIDTH, deep_compiled
from tests.scripts import deepcompile
from tests.scripts.declared import Script
from tests.training import models
from tests.training.options import Options
from tests.training.run import Outcome
from tests.training.trainers import EngineTrainer, PlainTrainer, worst_difference


def in_a_row(pattern: str, scripts: Sequence[Script], patch: bool) -> dict[str, Outcome]:
    """Scripts of tests.scripts.deepcompile with as many micro steps, one after another.

    All by one engine, as it takes a minute until one is compiled. A script begins where the one
    before left the engine's weights, and none follows one that raised, or left something behind.
    Differences are in parts of the largest update. Runs on every rank.
    """
    torch._functorch.config.donated_buffer = False  # which PyTorch asks for to retain a graph
    [micro_steps] = {script.options.micro_steps for script in scripts}
    options = Options(micro_steps=micro_steps, steps=STEPS)
    start = patterns.build(pattern, WIDTH)
    plain = PlainTrainer(deepcopy(start).to(models.device()), options)
    engine = deep_compiled(start, options.config, patch)
    found: dict[str, Outcome] = {}
    for script in scripts:
        own = script is deepcompile.compiled_parameter_hook  # hooks of its own, which stay
        trainer = EngineTrainer(engine, options, strict=patch and not own)
        one = found[script.name] = Outcome(tolerance=1e-4)
        origin = plain.parameters()
        script(plain)
        expected = plain.parameters()
        try:
            script(trainer)
        except Exception as error:
            one.error = f"{type(error).__name__}: {error}"[:300]
            break
        ends = trainer.parameters()
        largest, _ = worst_difference(expected, origin)
        difference, one.where = worst_difference(ends, expected)
        one.difference, one.moved = difference / largest, 1.0
        print(f"exact {pattern} {script.name} {one}", flush=True)  # should the next one abort
        plain.module.load_state_dict(ends)
    return found
