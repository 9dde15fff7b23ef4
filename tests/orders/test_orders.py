"""Orders that were found to do harm, and generated ones."""

from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest

from tests.harness.stock import RELEASE, Version
from tests.orders.verdict import Worlds
from tests.orders.words import Order, generated

#: Of generated orders in a test, and of tests.
COUNT, BATCHES = 60, 40
#: Orders that did harm: settings, each of which is tried, and words; see `SHORT`. By the release
#: that can run them.
HARMED = {
    "0.16.0": """
zero1, zero2, zero3 : TRAIN second TRAIN
zero1, zero2, zero3 : TRAIN TRAIN second TRAIN
zero1, zero2, zero3 : TRAIN shared TRAIN
zero1, zero2, zero3 : TRAIN second forget TRAIN
zero1, zero2 : TRAIN second TRAIN destroy TRAIN
zero1 micro2, zero2 micro2, zero3 micro2 : TWICE second TWICE TWICE
zero1 micro2, zero2 offloaded micro2, zero3 micro2 : second TWICE TWICE
zero1 micro2, zero2 micro2, zero3 micro2 : TWICE second TWICE destroy TWICE
zero1 micro2, zero2 micro2, zero3 micro2 : TWICE second forget TWICE
zero1 micro2, zero2 micro2, zero3 micro2 : unapply_all TRAIN apply_all TRAIN
zero2 offloaded micro2, zero3 offloaded micro2 : unapply_all TRAIN apply_all TRAIN
zero1 tiny, zero2 tiny : TRAIN block{ } TRAIN
zero1 tiny, zero2 tiny : TRAIN block{ forward } TRAIN
zero1, zero2, zero3 : block{ unrelated forward } backward step
zero3, zero3 coalesce : block{ ONCE forward } backward step
zero1 coalesce, zero3 coalesce : block{ forward grad backward } step
zero3 coalesce : BLOCK BLOCK TRAIN BLOCK BLOCK TRAIN
zero3 coalesce : forward forward block{ backward backward forward ONCE } backward step BLOCK
zero3 coalesce : block{ evaluate forward evaluate backward evaluate ONCE evaluate } step BLOCK
zero3 coalesce : block{ save forward save backward save ONCE save } step BLOCK
zero3 coalesce : block{ see_parameters forward see_parameters backward see_parameters } step BLOCK
zero3 : TRAIN block{ forward } backward step second block{ ONCE } step
zero3 : second block{ ONCE } step TWICE
zero3 : block{ ONCE } step second TWICE
zero3 : forward block{ backward forward } backward step
zero1 micro2 overlap, zero2 micro2 tiny, zero3 micro2 : forward SUMMED step SUMMED step TRAIN
zero1 micro2 overlap, zero2 micro2 tiny, zero3 micro2 : reentrant again backward step SUMS TRAIN
zero2 micro2 tiny, zero3 micro2 : ONCE freeze step reentrant backward freeze step TRAIN
zero2 tiny, zero2 tinier : block{ lone } step
zero1, zero1 offloaded, zero2 offloaded : block{ lone } step TRAIN
zero2 micro2 : block{ lone } step TRAIN
zero2, zero3 : TRAIN unapply:coalesce cached step
zero1 micro2, zero2 micro2, zero3 micro2 : ONCE raise{ forward } step TRAIN
zero2 offloaded : ONCE closed{ ONCE } step
zero2, zero3 offloaded : forward block{ unapply_all backward } step
zero2 micro2 : TWICE SUMS unapply:coalesce block{ } SUMS
zero2 tiny : second TRAIN
zero2 micro2 tinier : second boom zero_grad step TRAIN
zero1 bf16 : second TRAIN destroy shared TRAIN
zero1, zero2, zero3 : TRAIN step
zero1 offloaded, zero2 offloaded, zero3 offloaded : TRAIN step TRAIN step
zero1 offloaded micro2, zero2 micro2 : TRAIN raise{ ONCE } step
zero1 micro2 : block{ ONCE } step forward optimizer.zero_grad backward step
zero2 micro2 : TRAIN raise{ ONCE } optimizer.zero_grad TRAIN
zero2 micro2, zero3 micro2 : zero_grad TRAIN zero_grad TRAIN
zero2 micro2, zero3 micro2 : optimizer.zero_grad TRAIN optimizer.zero_grad TRAIN
zero1, zero2 offloaded, zero3 : block{ } step TRAIN
zero1 bf16, zero2, zero3 : block{ ONCE zero_grad } step TRAIN
zero2, zero3 : TRAIN block{ ONCE zero_grad } step
zero2 micro2, zero2 offloaded micro2, zero3 micro2 : ONCE step block{ } step
""",
    "0.18.3": """
zero0 micro2, zero1 micro2, zero2 micro2, zero3 micro2 : chain PLAIN chain PLAIN
zero0 micro2, zero1 micro2 : forward again PLAIN TRAIN
zero1, zero2, zero3 : chain again PLAIN TRAIN
zero1 micro2 : twice PLAIN twice PLAIN
zero2 micro2 : block{ } forward PLAIN forward PLAIN
zero1 micro2 : forward loss.backward unapply_all step TRAIN
zero2, zero3 : forward unapply_all PLAIN
zero3 offloaded : forward unapply:accumulation again backward step
zero1 bf16, zero1 scattered : forward PLAIN
zero1 bf16, zero1 scattered : forward loss.backward zero_grad forward PLAIN
zero1 bf16 micro2, zero1 scattered micro2 : forward PLAIN step
""",
    # In 0.18.3 a forward of stock's divides, whatever engine.backward() is told.
    "0.18.4": """
zero2 micro2 : unapply_all forward apply_all backward step TRAIN
""",
    "0.18.5": """
zero1 bf16 micro2 : TRAIN step
""",
    "0.19.4": """
zero2 unmanaged : boom zero_grad TRAIN
zero2 unmanaged : ONCE zero_grad TRAIN
zero2 unmanaged : ONCE zero_grad step
zero1 unmanaged, zero2 unmanaged, zero3 unmanaged : cached step
""",
}
#: What stands for several words.
SHORT = {
    "TWICE": "TRAIN TRAIN",
    "TRAIN": "ONCE step",
    "PLAIN": "loss.backward step",
    "SUMS": "block{ SUMMED } step",
    "SUMMED": "forward reentrant summed",
    "BLOCK": "block{ ONCE ONCE } step",
    "ONCE": "forward backward",
}


def fixed() -> Iterator[Any]:
    """Yield the orders; of those that differ in settings alone one is quick, in turn."""
    here = "".join(text for first, text in HARMED.items() if Version(first) <= RELEASE)
    for turn, line in enumerate(filter(None, here.splitlines())):
        settings, _, words = line.partition(" : ")
        words = reduce(lambda text, name: text.replace(name, SHORT[name]), SHORT, words)
        for index, setting in enumerate(every := settings.split(", ")):
            marks = [] if index == turn % len(every) else [pytest.mark.exhaustive]
            yield pytest.param(f"{setting} : {words}", marks=marks)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with Worlds() as both:
        yield both


@pytest.mark.core_case
@pytest.mark.parametrize("text", [*fixed()])
def test_no_harm_where_there_was_some(worlds: Worlds, text: str) -> None:
    assert not worlds.complaints([Order.of(text)])[0]


@pytest.mark.core_case(batch=0)
@pytest.mark.parametrize(
    "batch", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, BATCHES))]
)
def test_no_harm(worlds: Worlds, batch: int) -> None:
    """`python -m tests.orders SEED` runs one of them."""
    orders = {seed: generated(seed) for seed in range(COUNT * batch, COUNT * (batch + 1))}
    judged = zip(orders.items(), worlds.complaints([*orders.values()]), strict=True)
    harm = [f"{seed}: {order}\n    {complaint}" for (seed, order), complaint in judged if complaint]
    assert not harm, "\n".join(harm)
