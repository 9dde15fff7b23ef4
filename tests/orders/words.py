"""Orders: their text, and where they come from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tests.harness.options import BF16_SUMS, OFFLOADED, OVERLAP, Options
from tests.harness.stock import RELEASE, TORCH_STYLE

#: With what it requires, in place of all patches.
ALONE = ("coalesce", "accumulation")
#: How an engine is set.
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"stage": stage} for stage in range(4)},
    **{f"micro{count}": {"micro_steps": count} for count in (2, 4)},
    "offloaded": OFFLOADED,
    "overlap": OVERLAP,
    "tiny": {"zero": {"reduce_bucket_size": 110}},  # a weight has 96, all have 246
    "tinier": {"zero": {"reduce_bucket_size": 60}},
    "bf16": BF16_SUMS,
    "unmanaged": {"settings": {"managed_gradient_accumulation": False}},
    "scattered": {"zero": {"contiguous_gradients": False}},
    "sum": {"settings": {"gradient_allreduce_op": "sum"}},
    **{patch: {} for patch in ALONE},
}
#: The ways out of a ``coalesce_grad_reduction()`` block; ``raise{`` loses what it holds.
BLOCKS = ("block{", "raise{", "closed{")
PATCHING = ["apply_all", "unapply_all", "apply:coalesce", "apply:accumulation"]
PATCHING += ["unapply:coalesce", "unapply:accumulation", "unapply:zero3_retain"]
#: What may come anywhere.
ANYWHERE = ["evaluate", "grad", "zero_grad", "optimizer.zero_grad", "unrelated", "fails", "boom"]
ANYWHERE += ["block{ }", "block{ evaluate }", "block{ forward }", "raise{ forward }", "forward"]
ANYWHERE += ["block{ grad }", "block{ unrelated }", "closed{ forward backward }"]
#: Of engines over the same model, or over one that shares a part of it.
ENGINES = ["second", "second", "other", "destroy", "forget", "shared"]
#: What makes a micro step, before it is counted.
MICRO_STEPS = ["forward backward"] * 6
MICRO_STEPS += ["forward again backward", "forward forward backward backward", "boom zero_grad"]
MICRO_STEPS += ["block{ forward backward forward backward }", "block{ forward } backward"]
MICRO_STEPS += ["block{ forward forward } backward backward", "forward block{ backward }"]
MICRO_STEPS += ["block{ forward backward }", "raise{ forward backward } forward backward"]
MICRO_STEPS += ["forward forward summed", "reentrant backward", "forward reentrant summed"]
MICRO_STEPS += ["reentrant again backward", "block{ reentrant backward forward backward }"]
MICRO_STEPS += ["forward backward freeze", "block{ forward reentrant summed }"]
#: The first engine's epilogue runs where a backward is seen without engine.backward().
CHAINS = ["chain backward", "twice backward", "forward backward chain backward"]
#: By stage, what stock's own behaviour makes unlike plain PyTorch, or end: a backward that raised
#: leaves part of its gradients, and each engine prefetches what both have. What stands in for it.
LEFT_TO_STOCK = {("zero0", "boom"): "boom zero_grad", ("zero3", "shared"): "second"}


@dataclass(frozen=True)
class Order:
    settings: tuple[str, ...]
    words: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Order:
        settings, _, words = text.partition(" : ")
        return cls(tuple(settings.split()), tuple(words.split()))

    def __str__(self) -> str:
        return " ".join([*self.settings, ":", *self.words])

    @property
    def options(self) -> Options:
        merged: dict[str, Any] = reduce(_merged, (SETTINGS[name] for name in self.settings), {})
        return Options(rates=(0.5,), **merged)

    @property
    def only(self) -> list[str] | None:
        return [patch for patch in ALONE if patch in self.settings] or None


def _merged(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = first.keys() & other.keys()
    return {**first, **other, **{name: {**first[name], **other[name]} for name in both}}


def generated(seed: int) -> Order:
    """Some steps as they should be, with a few words put in between."""
    chance = random.Random(seed)
    settings = [chance.choice(["zero1", "zero2", "zero3"] * 3 + ["zero0"])]
    count = chance.choice([1, 1, 2, 2, 4])
    settings += [f"micro{count}"] * (count > 1)
    if settings[0] != "zero0":
        more = [*([["offloaded"], ["overlap"], ["bf16"]] * 2), *[[]] * 6]
        settings += chance.choice([["tiny"], ["tinier"], [], []])
        more += [["unmanaged"], ["sum"]] if str(RELEASE) >= "0.19.6" else []
        settings += chance.choice(more)
    subject = chance.choice(["blocks", "patching", "engines", "chains", "all"])
    micro_steps = MICRO_STEPS + CHAINS * 4 * (TORCH_STYLE and subject == "chains")
    between = ANYWHERE + PATCHING * (2 if subject == "patching" else subject == "all")
    between += ENGINES * (3 if subject == "engines" else subject == "all")
    words: list[str] = []
    for _ in range(chance.choice([1, 2, 3]) * count):
        words += [*chance.choice(micro_steps).split(), "step"]
    if TORCH_STYLE and chance.random() < 0.3:
        words = ["loss.backward" if word == "backward" else word for word in words]
    for _ in range(chance.choice([1, 1, 2, 3])):
        index, put = chance.randint(0, len(words)), chance.choice(between)
        put = LEFT_TO_STOCK.get((settings[0], put), put)
        if put in ENGINES:  # where they make sense
            index = chance.choice([0, *(i + 1 for i, word in enumerate(words) if word == "step")])
        words[index:index] = put.split()
    if settings[0] == "zero1" and count > 1:
        # There a block that raises takes the step's earlier micro steps along, as documented.
        words = ["block{" if word == "raise{" else word for word in words]
    return Order(tuple(settings), (*["unapply_all"] * (chance.random() < 0.1), *words))
