"""Libraries that put a function of their own in the place of one that a patch wraps.

Theirs is a copy of upstream's, as such libraries have it, which knows nothing of ours.
"""

import contextlib
import os
from collections.abc import Iterator
from pkgutil import resolve_name
from types import FunctionType, MethodType
from typing import Any

import pytest

import ds_patches
from ds_patches.core import live
from ds_patches.core.state import State
from ds_patches.startup import command
from tests.harness import models
from tests.harness.options import Options
from tests.harness.run import Outcome, measure
from tests.world import World

ZERO = "deepspeed.runtime.zero"
ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
LIBRARY = "another_library"


@pytest.fixture(scope="module")
def apart() -> Iterator[World]:
    """Ranks of their own: what was replaced once is in their status for good."""
    with World(variables=command.variables(os.environ)) as living:
        yield living


def theirs(kind: Any, name: str) -> Any:
    """Return such a library's function: a copy of upstream's, or a context that does nothing."""
    if name == "no_sync":
        return contextlib.nullcontext
    upstream = live.innermost(getattr(kind, name))
    names = {**upstream.__globals__, "__name__": LIBRARY}
    parts = (upstream.__code__, names, name, upstream.__defaults__, upstream.__closure__)
    return FunctionType(*parts)


def replaced(place: str, stage: int, at_one_engine: bool) -> tuple[Outcome, list[str]]:
    """Two backwards a step beside such a library, and what the status says of it."""
    owner, name = place.rsplit(".", 1)
    kind = resolve_name(owner)

    def script(trainer: Any) -> None:
        if trainer.is_engine and at_one_engine:
            own, engine = theirs(kind, name), trainer.engine
            setattr(engine, name, MethodType(own, engine) if isinstance(own, FunctionType) else own)
        for step in trainer.steps():
            for part in range(2):
                trainer.backward(models.loss_of(trainer, step, part))
            trainer.step()

    with pytest.MonkeyPatch.context() as library:
        if not at_one_engine:
            library.setattr(kind, name, theirs(kind, name))
        outcome = measure(script, Options(stage), strict=False)
        statuses = [status for status in ds_patches.status().values() if place in status.reason]
    assert all(status.state is State.FAILED for status in statuses)
    return outcome, [status.reason for status in statuses]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("place", "stage", "at_one_engine"),
    [
        (f"{ENGINE}.backward", 2, False),
        (f"{ENGINE}.backward", 3, True),
        (f"{ENGINE}.no_sync", 2, False),
        (f"{ENGINE}.no_sync", 3, True),
        (f"{ZERO}.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module", 3, False),
        (f"{ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3.partition_grads", 3, False),
    ],
)
def test_a_function_in_the_place_of_ours(
    apart: World, place: str, stage: int, at_one_engine: bool
) -> None:
    """The status has it, as the log of a later engine, and these loops are right all the same."""
    by = "contextlib.nullcontext" if place.endswith("no_sync") else LIBRARY
    for outcome, reasons in apart.run(replaced, place, stage, at_one_engine):
        assert outcome.equal, outcome
        assert bool(reasons) is not at_one_engine, "what a single engine has is not looked at"
        # Stock keeps engines of stage 3 for ever, also those of earlier tests.
        heard = [text for text in outcome.said if place in text]
        assert all(f"{place} is replaced by {by}" in text for text in (*reasons, *heard))
        assert len(heard) <= len(reasons)
