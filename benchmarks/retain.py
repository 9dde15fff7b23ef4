"""zero3_retain, measured: ``torchrun --nproc-per-node 2 -m benchmarks.retain [options]``.

Several backwards over one ZeRO-3 forward. 16 x (Linear(4096, bias=False) + ReLU) in bf16, batch 512
per rank, prefetch and reduce buckets of one layer, AdamW; one forward, two scalar losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.engines import around, batches, config, mlp
from benchmarks.harness import main
from benchmarks.probes import Forward, held_mib
from benchmarks.rows import Row, find, ratios
from benchmarks.tables import Bar, number, over
from benchmarks.timing import Mark, Step
from benchmarks.workload import PATCHED, STOCK, Standing, Workload

LOSSES = 2
_RESIDENT, _IDLE, _STEP = 1.02, 1.01, 1.20

Batch = tuple[Tensor, ...]  # the inputs, and a target for each loss
Way = Callable[[Any, Batch, Mark], None]
Backward = Callable[[Any, Tensor, bool], None]


def _loss(batch: Batch, outputs: Tensor, index: int) -> Tensor:
    """A scalar whose graph holds nothing that the model's graph does not hold already."""
    return (outputs * batch[1 + index]).mean()


def _by_engine(engine: Any, loss: Tensor, keep_graph: bool) -> None:
    engine.backward(loss, retain_graph=keep_graph)


def _by_scale(engine: Any, loss: Tensor, keep_graph: bool) -> None:
    engine.scale(loss, retain_graph=keep_graph).backward(retain_graph=keep_graph)


def _by_tensor(engine: Any, loss: Tensor, keep_graph: bool) -> None:
    loss.backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]


# A step marks the end of each of its phases while all is alive that a user's variables would hold:
# a mark may read memory or gradients.


def _one_forward(
    engine: Any,
    batch: Batch,
    mark: Mark,
    *,
    count: int = LOSSES,
    backward: Backward = _by_engine,
    zero_grad: bool = True,
    keep_graph: bool = False,
) -> None:
    """A backward for each loss. `keep_graph`: what it would hold if one more followed."""
    outputs = engine(batch[0])
    losses = [_loss(batch, outputs, index) for index in range(count)]
    mark("forward")
    for number_, loss in enumerate(losses, start=1):
        if number_ > 1 and zero_grad:
            engine.zero_grad()
            mark("zero_grad")
        backward(engine, loss, keep_graph or number_ < count)
        mark(f"backward {number_}")
    del loss, losses, outputs
    engine.step()
    mark("step")


_ordinary = partial(_one_forward, count=1)


def _a_forward_each(engine: Any, batch: Batch, mark: Mark) -> None:
    """A forward and a backward for each loss: what one does where a graph can run but once.

    The gradients add up. ``engine.zero_grad()`` between them would not clear what ZeRO-3 has
    reduced already.
    """
    for index in range(LOSSES):
        outputs = engine(batch[0])
        loss = _loss(batch, outputs, index)
        mark(f"forward {index + 1}")
        _by_engine(engine, loss, False)
        mark(f"backward {index + 1}")
        del loss, outputs
    engine.step()
    mark("step")


@dataclass(frozen=True)
class Kind:
    """A row. `summed`: the losses whose gradients its optimizer step should see."""

    title: str
    mode: str
    step: Way
    summed: tuple[int, ...] = (LOSSES - 1,)
    holds_all: bool = False  # every parameter persistent: what a backward costs without gathers
    crash: str = ""  # what upstream says when it fails, as it should


_FIRST, _ALL = (0,), tuple(range(LOSSES))
_CRASH = "The size of tensor a (0) must match"
_BY_SCALE, _BY_TENSOR = (partial(_one_forward, backward=by) for by in (_by_scale, _by_tensor))
_SUM = partial(_one_forward, zero_grad=False)

KINDS = {
    1: Kind("stock, ordinary step, K=1", STOCK, _ordinary, _FIRST),
    2: Kind("patched, ordinary step, K=1", PATCHED, _ordinary, _FIRST),
    3: Kind("stock, K=2", STOCK, _one_forward, crash=_CRASH),
    4: Kind("patched, K=2, engine.backward", PATCHED, _one_forward),
    5: Kind("patched, K=2, engine.scale(l).backward", PATCHED, _BY_SCALE),
    6: Kind("patched, K=2, l.backward", PATCHED, _BY_TENSOR),
    7: Kind("patched, K=2, sum without zero_grad", PATCHED, _SUM, _ALL),
    8: Kind("stock, K=2 by two forwards, sum", STOCK, _a_forward_each, _ALL),
    9: Kind("stock, all persistent, K=1", STOCK, _ordinary, _FIRST, holds_all=True),
    10: Kind("stock, all persistent, K=2", STOCK, _one_forward, holds_all=True),
}
_ORDINARY, _PATCHED_ORDINARY, _RETAINED, _PERSISTENT = 1, 2, 4, 9
#: On one engine each; the crash last, for whatever it leaves behind.
_TOGETHER = ((1, 2, 4, 5, 6, 7, 8), (9, 10), (3,))


_FULL = {"layers": 16, "width": 4096, "batch": 512, "warmup": 5, "steps": 20, "rounds": 10}
_SMOKE = {"layers": 2, "width": 64, "batch": 8, "warmup": 3, "steps": 2, "rounds": 2}


class Retain(Workload):
    __doc__ = __doc__
    name, patches = "retain", ("zero3_retain",)
    keys, heads, against = ("number", "title"), ("#", "row"), "reference"
    full, smoke = _FULL, _SMOKE
    more = (("MiB after each backward", lambda row: _mib(row)),)

    def standing_together(self) -> Iterator[list[Row]]:
        for numbers in _TOGETHER:
            yield [Row({"number": one, "title": KINDS[one].title}) for one in numbers]

    def is_patched(self, row: Row) -> bool:
        return _kind(row).mode == PATCHED

    def data(self, row: Row) -> Batch:
        return batches(1 + LOSSES, self.options.batch, self.options.width, self.device)

    def engine(self, row: Row) -> AbstractContextManager[Any]:
        of, layer = self.options, self.options.width**2
        settings = config(
            of.batch,
            stage=3,
            reduce_bucket_size=layer,
            sub_group_size=10**9,
            stage3_prefetch_bucket_size=layer,
            stage3_param_persistence_threshold=layer if _kind(row).holds_all else 0,
            stage3_max_live_parameters=10**9,
            stage3_max_reuse_distance=10**9,
            memory_efficient_linear=True,
        )
        return around(mlp(of.layers, of.width, self.device), settings)

    def step(self, row: Row, engine: Any, data: Batch) -> Step:
        return partial(_kind(row).step, engine, data)

    def plain(self, row: Row, data: Batch) -> Callable[[Forward], None]:
        return partial(_plain, data, _kind(row).summed)

    def reduced_after(self, row: Row) -> str:
        return "backward 1" if _kind(row).step is _ordinary else f"backward {LOSSES}"

    def look(self, at: Standing) -> None:
        super().look(at)
        at.row.found["held"] = self._held(at, at.step)
        if _kind(at.row).step is _ordinary:
            kept = partial(_ordinary, at.engine, at.data, keep_graph=True)
            at.row.found["held_graph_kept"] = self._held(at, kept)

    def _held(self, at: Standing, step: Step) -> list[dict[str, Any]]:
        """After each backward of a step of its own."""
        held = held_mib(step, self.device, at.before).items()
        return [{"after": name, "mib": mib} for name, mib in held if name.startswith("backward")]

    def label(self, row: Row) -> tuple[str, str]:
        return str(row["number"]), row["title"]

    def reference(self, row: Row, rows: Sequence[Row]) -> Row | None:
        """The other one with which it shares an engine."""
        return find(rows, number=_PERSISTENT if _kind(row).holds_all else _ORDINARY)

    def bars(self, rows: Sequence[Row], p2p: bool) -> Iterator[Bar]:
        alike = "the same, kept graphs against a kept graph"
        yield Bar("resident after each backward", _resident(rows, False), _RESIDENT)
        yield Bar(alike, _resident(rows, True), _RESIDENT)
        for name, number_, base, bar in (
            ("idle cost: patched ordinary step", _PATCHED_ORDINARY, _ORDINARY, _IDLE),
            ("step with K=2", _RETAINED, _ORDINARY, _STEP),
            ("stock, all persistent: K=2 over K=1", 10, _PERSISTENT, None),
        ):
            found = ratios(find(rows, number=number_), find(rows, number=base))
            yield Bar.of_rounds(name, found, bar)

    def may_fail(self, row: Row) -> bool:
        crash = _kind(row).crash
        return bool(crash) and crash in (row.error or "")

    def wrong(self, row: Row) -> Iterator[str]:
        if _kind(row).crash and not self.may_fail(row):
            yield f"not the known crash: {row.error or 'it ran'}"
        elif not _kind(row).crash:
            yield from super().wrong(row)


def _kind(row: Row) -> Kind:
    return KINDS[row["number"]]


def _plain(batch: Batch, losses: Sequence[int], forward: Forward) -> None:
    """Backwards over one forward, in plain PyTorch."""
    outputs = forward(batch[0])
    for index in losses:
        _loss(batch, outputs, index).backward(retain_graph=True)  # type: ignore[no-untyped-call]


def _resident(rows: Sequence[Row], like_with_like: bool) -> float | None:
    """The most MiB after a backward of the patched rows with several, over an ordinary one's.

    like_with_like: a backward that keeps its graph against an ordinary one that keeps it. Else
    against one that frees it; the activations that any kept graph holds then count as ours.
    """
    base = find(rows, number=_ORDINARY)
    if base is None or not base.get("held_graph_kept"):
        return None
    freed, kept = (base.get(name)[-1]["mib"] for name in ("held", "held_graph_kept"))
    found = []
    for row in rows:
        held = row.get("held") or [] if _kind(row).mode == PATCHED and row["number"] > 2 else []
        for one in held:
            keeps_graph = one is not held[-1]
            found.append(over(one["mib"], kept if keeps_graph and like_with_like else freed))
    return max((ratio for ratio in found if ratio is not None), default=None)


def _mib(row: Row) -> str:
    return ", ".join(number(held["mib"], 0) for held in row.get("held") or ()) or "-"


if __name__ == "__main__":
    raise SystemExit(main(Retain))
