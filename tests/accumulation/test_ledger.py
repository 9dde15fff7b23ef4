"""Ordinary loops that stock gets wrong on some release: patched, each is right on every one."""

from functools import partial
from typing import Any

import pytest

from tests.harness import BF16_SUMS, OFFLOADED, OVERLAP, SCATTERED, World, checked, of, run
from tests.harness.stock import RELEASE, Version
from tests.scripts import accumulating, heads, losses, ordinary
from tests.scripts.declared import Script

accumulation = partial(of, "accumulation", steps=4)
FOUR: dict[str, Any] = {**OFFLOADED, "micro_steps": 4}

test_an_ordinary_loop_is_right = checked(
    accumulation(losses.two_forwards, 2, core={2}),
    accumulation(accumulating.two_forwards_first, 3, core={3}),
    accumulation(heads.one_head_then_the_other, 3),
    accumulation(ordinary.micro_steps, 2, core={2}, **FOUR),
    accumulation(losses.two_forwards, 2, core={2}, clip=0.05, **OFFLOADED),
    accumulation(ordinary.micro_steps, 2, core={2}),
    accumulation(heads.used_in_the_first_step_only, 3, core={3}),
    accumulation(heads.used_in_the_first_step_only, 2, core={2}, **OFFLOADED),
    accumulation(losses.around_the_engine, 2, 3, core={2, 3}),
    accumulation(accumulating.scaled_by_the_user, 2, core={2}),
    # To 0.18.4 the optimizer is that of half precision without ZeRO.
    of("accumulation half_without_zero", ordinary.one_backward, 1, core={1}, **BF16_SUMS),
    accumulation(ordinary.one_backward, 1, core={1}, **OFFLOADED, **BF16_SUMS),
    accumulation(heads.other_head_in_each_micro_step, 1, core={1}, **OVERLAP),
    accumulation(ordinary.one_backward, 2, core={2}, **SCATTERED),
)


@pytest.mark.core_case
@pytest.mark.parametrize(
    ("script", "more", "first", "right"),
    [
        (losses.two_forwards, {}, "0.17.6", "9"),  # up to 0.18.2 it raises (PR 7665)
        (ordinary.micro_steps, FOUR, "0.16.0", "0.19.0"),  # PR 7967, issue 6550
        (ordinary.micro_steps, {}, "0.17.6", "0.18.3"),  # issue 7718
        (accumulating.scaled_by_the_user, {"micro_steps": 2}, "0.18.3", "0.18.4"),
    ],
)
def test_stock_is_wrong_until_it_is_mended(
    world: World, script: Script, more: dict[str, Any], first: str, right: str
) -> None:
    if Version(first) > RELEASE:
        pytest.skip(f"{first} is the first release that is wrong here")
    for outcome in world.run(run, script, script.at(2, steps=4, **more)):
        if Version(right) > RELEASE:
            assert outcome.error or outcome.difference > max(1e-3, outcome.tolerance)
        else:
            assert outcome.equal, outcome
