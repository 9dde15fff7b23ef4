"""The ledger: where a release's gradients are wrong, and that they are PyTorch's with the patch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.accumulation.ledger import LEDGER, Entry
from tests.scripts import heads, ordinary
from tests.training.options import OFFLOADED, Options
from tests.training.run import check, run
from tests.training.stock import RELEASE, Version
from tests.world import World


def within(first: str, last: str) -> bool:
    return Version(first) <= RELEASE <= Version(last)


def entries(core: tuple[str, ...]) -> pytest.MarkDecorator:
    """The ledger; `core`: the entries that are run on every release, of those that are to be."""
    return pytest.mark.parametrize(
        "entry",
        [
            pytest.param(
                entry,
                id=entry.name,
                marks=[pytest.mark.core_case] if entry.core and entry.id in core else [],
            )
            for entry in LEDGER
        ],
    )


@entries(core=("A1", "A2", "A4"))
def test_stock_is_wrong_until_it_is_mended(world: World, entry: Entry) -> None:
    if Version(entry.first) > RELEASE:
        pytest.skip(f"{entry.first} is the first release that is wrong here")
    for outcome in world.run(run, entry.script, entry.options):
        if within(entry.first, entry.last):
            assert outcome.error or outcome.difference > max(1e-3, outcome.tolerance)
        else:
            assert outcome.equal, outcome


@entries(core=tuple(entry.id for entry in LEDGER))
def test_patched_is_pytorch(world: World, entry: Entry) -> None:
    check(world, entry.script, entry.options, "accumulation")


@pytest.mark.parametrize("more", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize(
    "script",
    [
        ordinary.one_backward,
        ordinary.micro_steps,
        heads.with_evaluations,
        heads.half_of_the_outputs,
    ],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ordinary_loops(world: World, stage: int, script: Any, more: dict[str, Any]) -> None:
    """Where stock is right, and where a forward leads nowhere."""
    micro_steps = script.options.micro_steps
    check(world, script, Options(stage, micro_steps=micro_steps, **more), "accumulation")
