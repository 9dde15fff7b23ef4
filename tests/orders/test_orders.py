"""Orders that were found to do harm, and generated ones."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from tests.harness.stock import RELEASE, TORCH_STYLE
from tests.orders.verdict import Worlds
from tests.orders.words import Order, generated

#: Of generated orders in a test, and of tests.
COUNT, BATCHES = 60, 40
#: What is to be done for a micro step, and again after the second engine was made.
TRAIN = "forward backward step"
TWICE = f"{TRAIN} {TRAIN}"
ONCE = "forward backward"

BLOCK = "block{ forward backward forward backward } step"
AFTER_ALL_FORWARDS = "forward forward block{ backward backward forward forward backward }"
BETWEEN = f"block{{ {3 * '% forward % backward '} % }} step "
TWO_FORWARDS_IN_A_BLOCK = "block{ forward reentrant summed } step"
#: Orders that did harm, by what they have in common.
HARMED: dict[str, list[str]] = {
    "after an engine that was left": [
        *(f"{settings} : {TRAIN} second {TRAIN}" for settings in ("zero1", "zero2")),
        *(f"zero{stage} : {TRAIN} {TRAIN} second {TRAIN}" for stage in (1, 2, 3)),
        *(f"zero{stage} : {TRAIN} shared {TRAIN}" for stage in (1, 2, 3)),
        *(f"zero{stage} : {TRAIN} second forget {TRAIN}" for stage in (1, 2, 3)),
        *(f"zero{stage} : {TRAIN} second {TRAIN} destroy {TRAIN}" for stage in (1, 2)),
        *(
            f"{settings} micro2 : {way}"
            for settings in ("zero1", "zero2", "zero2 offloaded", "zero3")
            for way in (
                f"{TWICE} second {TWICE} {TWICE}",
                f"second {TWICE} {TWICE}",
                f"{TWICE} second {TWICE} destroy {TWICE}",
                f"{TWICE} second forget {TWICE}",
            )
        ),
    ],
    "applied in the middle": [
        f"{settings} micro2 : unapply_all {TRAIN} apply_all {TRAIN}"
        for settings in ("zero3", "zero3 offloaded", "zero2 offloaded", "zero2", "zero1")
    ],
    "blocks without a backward": [
        f"zero{stage} tiny : {TRAIN} {block}"
        for stage in (1, 2)
        for block in (f"block{{ }} {TRAIN}", f"block{{ forward }} {TRAIN}")
    ],
    "backwards after their block": [
        *(f"zero{stage} : block{{ unrelated forward }} backward step" for stage in (1, 2, 3)),
        "zero3 : block{ forward backward forward } backward step",
    ],
    "in blocks": [
        *(f"zero{stage} coalesce : block{{ forward grad backward }} step" for stage in (1, 3)),
        f"zero3 coalesce : {BLOCK} {BLOCK} {TRAIN} {BLOCK} {BLOCK} {TRAIN}",
        f"zero3 coalesce : {AFTER_ALL_FORWARDS} backward step {BLOCK}",
        *(
            f"zero3 coalesce : {2 * BETWEEN.replace('%', word)}"
            for word in ("evaluate", "see_parameters", "save")
        ),
        "zero3 coalesce : block{ forward backward forward } backward step",
    ],
    "first forwards in blocks": [
        f"zero3 : {TRAIN} block{{ forward }} backward step second return{{ {ONCE} }} step",
        f"zero3 : second block{{ forward backward }} step {TRAIN} {TRAIN}",
        f"zero3 : block{{ forward backward }} step second {TRAIN} {TRAIN}",
        "zero3 : forward block{ backward forward } backward step",
    ],
    "unmanaged": [
        "zero2 unmanaged : boom zero_grad forward backward step",
        "zero2 unmanaged : forward backward zero_grad forward backward step",
        "zero2 unmanaged : forward backward zero_grad step",
        *(f"zero{stage} unmanaged : cached step" for stage in (1, 2, 3)),
    ],
    "chains": [
        *(f"zero{stage} micro2 : {2 * 'chain loss.backward step '}" for stage in range(4)),
        *(f"zero{stage} micro2 : forward again loss.backward step {TRAIN}" for stage in (0, 1)),
        *(f"zero{stage} : chain again loss.backward step {TRAIN}" for stage in (1, 2, 3)),
        "zero1 micro2 : twice loss.backward step twice loss.backward step",
    ],
    "arrive again": [
        f"{settings} : {way} step {TRAIN}"
        for settings in ("zero1 micro2 overlap", "zero2 micro2 tiny", "zero3 micro2")
        for way in (
            "forward forward summed step forward reentrant summed",
            "reentrant again backward step block{ forward reentrant summed }",
            "forward backward freeze step reentrant backward freeze",
        )
    ],
    "one rank alone": [f"zero2 {size} : block{{ lone }} step" for size in ("tiny", "tinier")],
    "raised in the middle": [
        *(f"zero{n} micro2 : forward backward raise{{ forward }} step {TRAIN}" for n in (1, 2, 3)),
        "zero2 offloaded : forward backward closed{ forward backward } step",
    ],
    "taken back in a block": [
        f"{settings} : forward block{{ unapply_all backward }} step"
        for settings in ("zero2", "zero3 offloaded")
    ],
    # An empty one runs DeepSpeed's epilogue without a backward.
    "blocks of stock": [
        f"zero2 micro2 : {TWICE} {TWO_FORWARDS_IN_A_BLOCK} unapply:coalesce block{{ }} "
        f"{TWO_FORWARDS_IN_A_BLOCK}"
    ],
    "given back before the backward": [
        f"zero1 micro2 : forward loss.backward unapply_all step {TRAIN}",
        *(f"zero{stage} : forward unapply_all loss.backward step" for stage in (2, 3)),
        "zero3 offloaded : forward unapply:accumulation again backward step",
    ],
    "of engines that never trained": [
        "zero2 tiny : second forward backward step",
        "zero2 micro2 tinier : second boom zero_grad step forward backward step",
        "zero1 bf16 : second forward backward step destroy shared forward backward step",
    ],
    "without a backward at the boundary": [
        *(f"zero{stage} : {TRAIN} step" for stage in (1, 2, 3)),
        *(f"zero{stage} offloaded : {TRAIN} step {TRAIN} step" for stage in (1, 2, 3)),
        *(["zero1 bf16 micro2 : forward backward step step"] if str(RELEASE) >= "0.18.5" else []),
        "zero1 offloaded micro2 : forward backward step raise{ forward backward } step",
        "zero2 micro2 : forward backward step raise{ forward backward } step",
    ],
    "dropped after a block": [
        "zero1 micro2 : block{ forward backward } step forward optimizer.zero_grad backward step",
        f"zero2 micro2 : {TRAIN} raise{{ forward backward }} optimizer.zero_grad {TRAIN}",
    ],
    "zeroed at the top": [
        f"zero{stage} micro2 : {zero} {TRAIN} {zero} {TRAIN}"
        for stage in (2, 3)
        for zero in ("zero_grad", "optimizer.zero_grad")
    ],
    "where no hook counts gradients": [
        f"zero1 {setting}{rest}"
        for setting in ("bf16", "scattered")
        for rest in (
            " : forward loss.backward step",
            " : forward loss.backward zero_grad forward loss.backward step",
            " micro2 : forward loss.backward step step",
        )
    ],
}
#: Those that other releases of DeepSpeed cannot run.
NEEDS = {
    "unmanaged": str(RELEASE) >= "0.19.4",
    "chains": TORCH_STYLE,
    "given back before the backward": TORCH_STYLE,
    "where no hook counts gradients": TORCH_STYLE,
}


def fixed() -> Iterator[Any]:
    """Yield the orders; of those that differ in settings alone one is quick, in turn."""
    alike: dict[str, list[str]] = {}
    for text in chain(*(texts for name, texts in HARMED.items() if NEEDS.get(name, True))):
        alike.setdefault(text.partition(" : ")[2], []).append(text)
    for turn, texts in enumerate(alike.values()):
        for index, text in enumerate(texts):
            is_quick = index == turn % len(texts)
            yield pytest.param(text, marks=[] if is_quick else [pytest.mark.exhaustive])


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
    """`python -m tests.orders SEED` shrinks one of those that fail."""
    orders = {seed: generated(seed) for seed in range(COUNT * batch, COUNT * (batch + 1))}
    judged = zip(orders.items(), worlds.complaints([*orders.values()]), strict=True)
    harm = [f"{seed}: {order}\n    {complaint}" for (seed, order), complaint in judged if complaint]
    assert not harm, "\n".join(harm)
