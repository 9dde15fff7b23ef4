"""One run of a user's script on a rank, what came of it, and what it must have come to."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import ds_patches
from ds_patches.core import registry, release
from tests.harness import options, trainers
from tests.harness.collectives import Gradients
from tests.listening import listening
from tests.world import World


@dataclass
class Run:
    """error: what ended it, in place of all the rest.

    engine_steps: of the DeepSpeedEngine that trained; None if none did.
    live, offered: patches, and those that are for this release of DeepSpeed.
    """

    error: str = ""
    losses: list[float] = field(default_factory=list)
    parameters: trainers.Parameters = field(default_factory=dict)
    engine_steps: int | None = None
    reductions: int = 0
    live: list[str] = field(default_factory=list)
    offered: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)


def script(name: str, *arguments: Any, **options: Any) -> Run:
    """Run a function of a script of `user/`: "file:function"."""
    from deepspeed import DeepSpeedEngine

    result = Run()
    with a_new_process(), listening() as result.heard, Gradients() as sent:
        try:
            train = resolve_name(f"tests.frameworks.user.{name}")
            trained = train(*arguments, **options)
        except Exception as error:
            result.error = f"{type(error).__name__}: {error}"
            return result
        result.reductions = len(sent.sent)
    result.live = [name for name, status in ds_patches.status().items() if status.live]
    installed = release.installed().version
    patches = [(name, patch) for name, patch in registry.patches().items() if patch.by_default]
    result.offered = [name for name, patch in patches if release.covers(patch.supported, installed)]
    result.losses = trained.losses
    if isinstance(trained.model, DeepSpeedEngine):
        result.engine_steps = trained.model.global_steps
    result.parameters = trainers.parameters(getattr(trained.model, "module", trained.model))
    return result


def automatic(stage: int, **zero: Any) -> dict[str, Any]:
    """A configuration whose sizes are the Trainer's, and one bucket for all gradients."""
    sizes = {"micro_steps": "auto", "train_micro_batch_size_per_gpu": "auto"}
    return options.config(stage, zero={"reduce_bucket_size": 10**6, **zero}, **sizes)


@contextmanager
def a_new_process() -> Iterator[None]:
    """Frameworks keep their state for the process, and here one process has many scripts.

    Left to itself, Accelerate counts one process where there is no GPU, also under DeepSpeed.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    ranks = os.environ["WORLD_SIZE"] != "1"
    launched = {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_DEEPSPEED": str(ranks)}
    if not ranks:
        launched["LOCAL_RANK"] = "-1"  # Accelerate 1.11 makes a process of any other number DDP's
    with mock.patch.dict(os.environ, launched):
        PartialState(backend="gloo" if ranks else None)
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            unset_hf_deepspeed_config()


def on_two(world: World, name: str, *arguments: Any, **options: Any) -> Run:
    """Return the run of rank 0, trained by an engine of DeepSpeed, or its error."""
    first, second = world.run(script, name, *arguments, **options)
    assert first.error == second.error
    assert first.reductions == second.reductions
    if not first.error:
        assert first.engine_steps
    return first


def assert_patched(run: Run) -> None:
    """By the environment alone, and with nothing to complain of."""
    assert not run.error, run.error
    assert run.live
    assert set(run.live) == set(run.offered)
    assert not run.heard
