"""The ledger: where a release's gradients are wrong, and that they are PyTorch's with the patch."""

from typing import Any, NamedTuple

import pytest

from tests.harness import BF16_SUMS, OFFLOADED, OVERLAP, SCATTERED, Options, World, check, run
from tests.harness.stock import RELEASE, Version
from tests.scripts import accumulating, heads, losses, ordinary
from tests.scripts.declared import Script

CLIPPED = {**OFFLOADED, "clip": 0.05}
FOUR = {**OFFLOADED, "micro_steps": 4}
NOW = "9"  # it has not ended


class Entry(NamedTuple):
    """An ordinary loop, and the releases whose stock is wrong there: from `first` to `last`.

    core: whether it runs on every chosen release.
    """

    id: str
    script: Script
    stage: int
    first: str
    last: str
    more: dict[str, Any] = {}  # noqa: RUF012
    core: bool = False

    @property
    def name(self) -> str:
        kinds = ("offload", "clip", "overlap", "bfloat16", "micro_steps")
        named = [kind for kind in kinds if kind in str(self.more)]
        return "-".join([self.id, self.script.name, str(self.stage), *named])

    @property
    def options(self) -> Options:
        return self.script.at(self.stage, **{"steps": 4, "model": "TwoHeads", **self.more})


LEDGER = (
    # Several backwards before one step: only the last counts; 0.17.6 to 0.18.2 crash (PR 7665).
    Entry("A1", losses.two_forwards, 1, "0.17.6", NOW),
    Entry("A1", losses.two_forwards, 2, "0.17.6", NOW, core=True),
    Entry("A1", losses.two_forwards, 2, "0.17.6", NOW, OVERLAP),
    Entry("A1", accumulating.two_forwards_first, 2, "0.17.6", NOW),
    Entry("A1", accumulating.two_forwards_first, 3, "0.18.5", NOW, core=True),
    Entry("A1", accumulating.two_forwards_first, 3, "0.18.5", NOW, OFFLOADED),
    Entry("A1", heads.one_head_then_the_other, 3, "0.16.0", NOW),
    Entry("A1", accumulating.boundaries_twice, 2, "0.17.6", NOW),
    Entry("A1", losses.two_backwards, 1, "0.17.6", NOW),
    # CPU offload: of four micro steps, those in the middle are dropped (PR 7967, issue 6550).
    Entry("A2", ordinary.micro_steps, 2, "0.16.0", "0.18.9", FOUR, core=True),
    # CPU offload: of several backwards at one boundary, only the last counts (PR 7981).
    Entry("A3", losses.two_forwards, 1, "0.16.0", NOW, OFFLOADED),
    Entry("A3", losses.two_forwards, 2, "0.16.0", NOW, CLIPPED, core=True),
    Entry("A3", accumulating.boundary_by_hand, 2, "0.16.0", "0.18.9", OFFLOADED),
    # Of several micro steps, only the last counts (issue 7718).
    Entry("A4", ordinary.micro_steps, 2, "0.17.6", "0.18.2", core=True),
    Entry("A4", accumulating.boundary_by_hand, 2, "0.17.6", "0.18.2"),
    # A parameter that a step has not used, or not yet, has the last step's gradient.
    Entry("A5", heads.used_in_the_first_step_only, 3, "0.16.0", NOW, core=True),
    Entry("A5", heads.used_in_the_first_step_only, 3, "0.16.0", NOW, OFFLOADED),
    Entry("A5", heads.used_in_the_first_step_only, 2, "0.16.0", NOW, OFFLOADED, core=True),
    Entry("A5", heads.head_used_late, 3, "0.16.0", NOW),
    Entry("A5", heads.head_used_late, 2, "0.19.0", NOW, OFFLOADED),
    # A forward of the model in the engine, between those of the engine (issue 8224, PR 8245).
    Entry("A6", losses.around_the_engine, 1, "0.18.3", "0.19.5"),
    Entry("A6", losses.around_the_engine, 2, "0.18.3", "0.19.5", core=True),
    Entry("A6", losses.around_the_engine, 3, "0.18.3", NOW, core=True),
    Entry("A6", losses.around_the_engine_first, 2, "0.18.3", "0.19.5"),
    Entry("A6", losses.around_the_engine_first, 3, "0.18.3", "0.19.5"),
    # Gradients are divided by the micro steps, though the user has asked for none of it (7724).
    Entry("A7", accumulating.scaled_by_the_user, 1, "0.18.3", "0.18.3"),
    Entry("A7", accumulating.scaled_by_the_user, 2, "0.18.3", "0.18.3", core=True),
    Entry("A7", accumulating.scaled_by_the_user, 3, "0.18.3", "0.18.3"),
    # fp32 sums of a bf16 model: the boundary's micro step is not averaged (PR 7985).
    Entry("A8", ordinary.micro_steps, 1, "0.18.3", "0.18.9", BF16_SUMS),
    Entry("A8", ordinary.one_backward, 1, "0.18.3", "0.18.9", BF16_SUMS, core=True),
    # The same with CPU offload: nothing is.
    Entry("A9", ordinary.one_backward, 1, "0.16.0", "0.19.7", OFFLOADED | BF16_SUMS, core=True),
    Entry("A9", ordinary.one_backward, 1, "0.16.0", "0.19.7", OFFLOADED | BF16_SUMS | OVERLAP),
    # overlap_comm: what the last micro step does not reach is lost.
    Entry("A10", heads.other_head_in_each_micro_step, 1, "0.16.0", NOW, OVERLAP, core=True),
    # Gradients that are not copied into one buffer: nothing is reduced on CPU (PR 8382).
    Entry("A11", ordinary.one_backward, 1, "0.16.0", "0.19.7", SCATTERED),
    Entry("A11", ordinary.one_backward, 2, "0.16.0", "0.19.7", SCATTERED, core=True),
)


def entries(*core: str) -> pytest.MarkDecorator:
    """The ledger; `core`: ids of those that are run on every release, if they are to be."""
    marks = {True: [pytest.mark.core_case], False: []}
    return pytest.mark.parametrize(
        "entry", [pytest.param(e, id=e.name, marks=marks[e.core and e.id in core]) for e in LEDGER]
    )


@entries("A1", "A2", "A4")
def test_stock_is_wrong_until_it_is_mended(world: World, entry: Entry) -> None:
    if Version(entry.first) > RELEASE:
        pytest.skip(f"{entry.first} is the first release that is wrong here")
    for outcome in world.run(run, entry.script, entry.options):
        if Version(entry.last) >= RELEASE:
            assert outcome.error or outcome.difference > max(1e-3, outcome.tolerance)
        else:
            assert outcome.equal, outcome


@entries(*(entry.id for entry in LEDGER))
def test_patched_is_pytorch(world: World, entry: Entry) -> None:
    # To 0.18.4 the optimizer of A8 is that of half precision without ZeRO.
    others = ["half_without_zero"] if entry.id == "A8" else []
    check(world, entry.script, entry.options, "accumulation", *others)
