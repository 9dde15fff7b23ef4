"""The trails of orders, and what of them is harm."""

from __future__ import annotations

import gc
import pickle
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

import ds_patches
from tests.orders.engines import Engines
from tests.orders.plain import Plain
from tests.orders.sides import Trail
from tests.orders.words import Order
from tests.world import RankError, World, WorldTimeout

#: For each order of a batch. A rank that takes longer waits for another, and ends.
SECONDS = 5
#: For one that has failed, and runs once more: the machine may be busy.
PATIENCE = 40
#: Of the farthest that a value is from its first one: what rounding makes, and what a loss makes.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


def go(texts: list[str], who: str, folder: str, seconds: int) -> None:
    """Runs on a rank: through these orders, one after the other, and notes the trail of each."""
    with open(f"{folder}/{dist.get_rank()}", "wb", buffering=0) as notes:
        for order in map(Order.of, texts):
            signal.alarm(seconds)
            if who == "patched":
                if order.only:
                    ds_patches.unapply_all()
                ds_patches.apply_all(only=order.only)
            side = Plain(order) if who == "plain" else Engines(order, who == "patched")
            trail = side.go()
            del side
            gc.collect()
            gc.freeze()
            dist.barrier()
            notes.write(pickle.dumps(trail))
        signal.alarm(0)


@dataclass
class Worlds:
    """Stock's processes have never had a patch applied."""

    of: dict[str, World] = field(default_factory=dict)

    def run(self, orders: Sequence[Order], who: str, seconds: int = SECONDS) -> list[list[Trail]]:
        """Return for each order one trail for each rank."""
        world = self.of.setdefault("patched" if who == "patched" else "stock", World())
        trails: list[list[Trail]] = []
        while rest := [str(order) for order in orders[len(trails) :]]:
            with tempfile.TemporaryDirectory() as folder:
                failure = ""
                try:
                    world.within(seconds * len(rest)).run(go, rest, who, folder, seconds)
                except (RankError, WorldTimeout) as error:  # of the first that has no trail
                    failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                noted = [_noted(Path(folder, str(rank))) for rank in range(world.size)]
                trails += map(list, zip(*noted, strict=False))
            if failure and len(trails) < len(orders):  # else it ended badly after the last one
                trails.append([Trail(error=failure)] * world.size)
        return trails

    def complaints(self, orders: Sequence[Order]) -> list[str]:
        """Return the harm in each order, or ""; also where PyTorch, too, raises."""
        complaints = self._complaints(orders, SECONDS)
        failed = [order for order, complaint in zip(orders, complaints, strict=True) if complaint]
        again = iter(self._complaints(failed, PATIENCE))
        return [complaint and next(again) for complaint in complaints]

    def _complaints(self, orders: Sequence[Order], seconds: int) -> list[str]:
        sides = (self.run(orders, who, seconds) for who in ("plain", "stock", "patched"))
        return [
            _first(map(_harm, orders_, *ranks))
            for orders_, *ranks in [
                ([order] * 2, *trails) for order, *trails in zip(orders, *sides, strict=True)
            ]
        ]

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *raised: object) -> None:
        for world in self.of.values():
            world.close()


def _noted(path: Path) -> list[Trail]:
    trails = []
    with suppress(EOFError, FileNotFoundError), path.open("rb") as notes:
        while True:
            trails.append(pickle.load(notes))
    return trails


def _first(complaints: object) -> str:
    return next(filter(None, complaints), "")  # type: ignore[call-overload]


#: By what a patch is refused where stock is right: it comes, or goes, in the midst of something.
IN_THE_MIDST = ("cannot be unapplied inside", "in a step that began before the patch was applied")


#: DeepSpeed's own errors in the step of an engine to which no gradient came.
WITHOUT_GRADIENTS = ("KeyError: 0", "IndexError: list", "TypeError: 'NoneType' object is not sub")


def _harm(order: Order, plain: Trail, stock: Trail, patched: Trail) -> str:
    """On one rank."""
    if not plain.seen:  # its rank did not end in time
        return f"plain PyTorch: {plain.error}"
    tolerance = TOLERANCE[order.options.dtype]
    stock_at, off_of_stock = _off(plain, stock, tolerance)
    index, off = _off(plain, patched, tolerance)
    is_right = stock_at is None and not stock.error
    of_stock = stock.error or ("right" if is_right else f"{off_of_stock:.2g} off")
    if index is not None:
        lost = len(stock.seen) if stock_at is None else stock_at - 1
        lost -= "coalesce_grad_reduction" in stock.error  # which it does not have
        if index > lost and not patched.patched[index]:
            return ""  # in a step that was stock's in part, in an order that stock gets wrong
        return f"{off:.2g} off, silent; stock: {of_stock}"
    same = stock.error.partition(":")[0] == patched.error.partition(":")[0]
    if (
        not patched.error
        or plain.error
        or (patched.is_ours and any(words in patched.error for words in IN_THE_MIDST))
        or (not is_right and (patched.is_ours or (stock.error and same)))
        or (not is_right and patched.error.startswith(WITHOUT_GRADIENTS))
        or (not is_right and not patched.raised_patched)
        or "coalesce_grad_reduction" in stock.error  # a release without: numbers alone compare
    ):
        return ""
    return f"{patched.error}; stock: {of_stock}"


def _off(plain: Trail, other: Trail, tolerance: float) -> tuple[int | None, float]:
    """Which of the values seen is the first that is off, and by how much of what it moved."""
    origin = plain.seen[0]  # the same for each module
    for index, (expected, actual) in enumerate(zip(plain.seen, other.seen, strict=False)):
        moved = expected - origin if expected.shape == origin.shape else expected
        scale = max(moved.abs().max().item(), 0.05)
        off = (expected - actual).abs().max().item() / scale
        if not off <= tolerance:
            return index, off
    return None, 0.0
