"""The ledger: where a release's gradients are wrong, and that they are PyTorch's with the patch."""

from __future__ import annotations

import pytest

from tests.accumulation.ledger import LEDGER, Entry
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
    # To 0.18.4 the optimizer of A8 is that of half precision without ZeRO.
    others = ["half_without_zero"] if entry.id == "A8" else []
    check(world, entry.script, entry.options, "accumulation", *others)
