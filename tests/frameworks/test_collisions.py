"""Libraries that put a function of their own in the place of one that a patch wraps.

Theirs is a copy of upstream's, as such libraries have it, which knows nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pkgutil import resolve_name
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import pytest
import torch

import ds_patches
from ds_patches.core import live
from ds_patches.core.state import State
from ds_patches.startup import variables
from tests.frameworks.outcome import EXACT
from tests.frameworks.user import engines
from tests.listening import listening
from tests.training import options, trainers
from tests.world import World

pytestmark = pytest.mark.exhaustive

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload"
STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"

LIBRARY = "another_library"
BOTH = [(2, False), (3, True)]


class Outcome(NamedTuple):
    """How far from PyTorch, and what is said: by the status, and in the log."""

    difference: float
    states: list[State]
    reasons: list[str]
    heard: list[str]


@pytest.fixture(scope="module")
def apart() -> Iterator[World]:
    """Ranks of their own: what was replaced once is in their status for good."""
    with World(variables=variables.of_program(os.environ)) as living:
        yield living


def theirs(kind: Any, name: str) -> Any:
    """What such a library would put there: a copy of upstream's, or a context that does nothing."""
    if name == "no_sync":
        return contextlib.nullcontext
    upstream = live.innermost(getattr(kind, name))
    names = {**upstream.__globals__, "__name__": LIBRARY}
    parts = (upstream.__code__, names, name, upstream.__defaults__, upstream.__closure__)
    return FunctionType(*parts)


def replaced(place: str, stage: int, at_one_engine: bool) -> Outcome:
    """Two backwards a step beside such a library, held against PyTorch."""
    owner, name = place.rsplit(".", 1)
    kind = resolve_name(owner)
    config = options.config(stage, zero={"reduce_bucket_size": 10**6})
    with pytest.MonkeyPatch.context() as library, listening() as heard:
        if not at_one_engine:
            library.setattr(kind, name, theirs(kind, name))
        engine, plain = (built(config) for config in (config, None))
        if at_one_engine:
            own = theirs(kind, name)
            setattr(engine, name, MethodType(own, engine) if isinstance(own, FunctionType) else own)
        loop(engine, deepspeed=True)
        loop(plain, deepspeed=False)
        ends = [trainers.parameters(model.module) for model in (engine, plain)]
        status = ds_patches.status()
    said = [one for one in status.values() if place in one.reason]
    return Outcome(
        trainers.worst_difference(*ends)[0],
        [one.state for one in said],
        [one.reason for one in said],
        heard,
    )


def built(config: dict[str, Any] | None) -> Any:
    torch.manual_seed(3)
    return engines.engine(engines.two_layers(4), config)


def loop(model: Any, deepspeed: bool) -> None:
    for step in range(3):
        for kind in range(2):
            model.backward(model(engines.rows(step, deepspeed, kind)).square().mean())
        model.step()


@pytest.mark.parametrize(
    ("place", "stage", "at_one_engine"),
    [
        *(
            (f"{ENGINE}.{name}", stage, one)
            for name in ("backward", "no_sync")
            for stage, one in BOTH
        ),
        (f"{OFFLOAD}._register_deepspeed_module", 3, False),
        (f"{STAGE3}.partition_grads", 3, False),
    ],
)
def test_a_function_in_the_place_of_ours(
    apart: World, place: str, stage: int, at_one_engine: bool
) -> None:
    """The status has it, the log says it once, and these loops are right all the same."""
    by = "contextlib.nullcontext" if place.endswith("no_sync") else LIBRARY
    for found in apart.run(replaced, place, stage, at_one_engine):
        assert found.difference < EXACT
        assert found.states == [State.SHADOWED]
        (why,) = found.reasons
        assert f"{place} is replaced by {by}" in why
        (said,) = found.heard
        assert f"{place} is replaced by {by}" in said
