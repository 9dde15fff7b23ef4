"""zero3_retain, measured: ``torchrun --nproc-per-node 2 -m benchmarks.retain [options]``.

Several backwards over one ZeRO-3 forward. 16 x (Linear(4096, bias=False) + ReLU) in bf16, batch 512
per rank, prefetch and reduce buckets of one layer, AdamW; one forward, two scalar losses.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import collectives
from benchmarks.backwards import (
    LOSSES,
    Batch,
    Way,
    a_forward_each,
    engine_backward,
    loss_of,
    one_forward,
    ordinary,
    plain_backward,
    scaled_backward,
)
from benchmarks.engines import batches, config, mlp, with_adamw
from benchmarks.gradients import Forward, full_weights, plain_gradients, relative_error
from benchmarks.harness import main
from benchmarks.probes import allocated_mib
from benchmarks.rows import Row, find, ratios
from benchmarks.tables import Bar, Table, error, number, over, phases, value
from benchmarks.timing import Step
from benchmarks.workload import PATCHED, STOCK, Standing, Workload

_FIRST, _LAST, _ALL = (0,), (LOSSES - 1,), tuple(range(LOSSES))
_RESIDENT, _IDLE, _STEP = 1.02, 1.01, 1.20


@dataclass(frozen=True)
class Kind:
    """A row. `summed`: the losses whose gradients its optimizer step should see."""

    title: str
    mode: str
    step: Way
    summed: tuple[int, ...]
    holds_all: bool = False  # every parameter persistent: what a backward costs without gathers
    crash: str = ""  # what upstream says when it fails, as it should

    @property
    def backwards(self) -> int:
        return 1 if self.step is ordinary else LOSSES


_BY_ENGINE = one_forward(engine_backward, zero_grad=True)
_BY_SCALE = one_forward(scaled_backward, zero_grad=True)
_PLAIN = one_forward(plain_backward, zero_grad=True)
_SUM = one_forward(engine_backward, zero_grad=False)

KINDS = {
    1: Kind("stock, ordinary step, K=1", STOCK, ordinary, _FIRST),
    2: Kind("patched, ordinary step, K=1", PATCHED, ordinary, _FIRST),
    3: Kind("stock, K=2", STOCK, _BY_ENGINE, _LAST, crash="The size of tensor a (0) must match"),
    4: Kind("patched, K=2, engine.backward", PATCHED, _BY_ENGINE, _LAST),
    5: Kind("patched, K=2, engine.scale(l).backward", PATCHED, _BY_SCALE, _LAST),
    6: Kind("patched, K=2, l.backward", PATCHED, _PLAIN, _LAST),
    7: Kind("patched, K=2, sum without zero_grad", PATCHED, _SUM, _ALL),
    8: Kind("stock, K=2 by two forwards, sum", STOCK, a_forward_each, _ALL),
    9: Kind("stock, all persistent, K=1", STOCK, ordinary, _FIRST, holds_all=True),
    10: Kind("stock, all persistent, K=2", STOCK, _BY_ENGINE, _LAST, holds_all=True),
}
_ORDINARY, _PATCHED_ORDINARY, _RETAINED, _TWO_FORWARDS, _PERSISTENT = 1, 2, 4, 8, 9
#: On one engine each; the crash last, for whatever it leaves behind.
_TOGETHER = ((1, 2, 4, 5, 6, 7, 8), (9, 10), (3,))


_FULL: dict[str, Any] = {
    "layers": 16,
    "width": 4096,
    "batch": 512,
    "warmup": 5,
    "steps": 20,
    "rounds": 10,
}
_SMOKE = {"layers": 2, "width": 64, "batch": 8, "warmup": 3, "steps": 2, "rounds": 2}


class Retain(Workload):
    __doc__ = __doc__
    name, patches = "retain", ("zero3_retain",)
    title = "zero3_retain: / an ordinary step of stock"
    keys, heads, against = ("number", "title"), ("#", "row"), "reference"
    full, smoke = _FULL, _SMOKE

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--prefetch-bucket", type=int, help="elements; one layer's by default")
        parser.add_argument("--max-reuse-distance", type=int, default=10**9, help="elements")
        parser.add_argument("--persistence", type=int, default=0, help="threshold, elements")
        every = list(KINDS)
        parser.add_argument("--only", type=int, nargs="+", choices=every, default=every)
        parser.add_argument("--profile", action="store_true", help="count collectives")

    def standing_together(self) -> Iterator[list[Row]]:
        for numbers in _TOGETHER:
            chosen = [number for number in numbers if number in self.options.only]
            if chosen:
                yield [Row({"number": one, "title": KINDS[one].title}) for one in chosen]

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
            stage3_prefetch_bucket_size=layer if of.prefetch_bucket is None else of.prefetch_bucket,
            stage3_param_persistence_threshold=layer if _kind(row).holds_all else of.persistence,
            stage3_max_live_parameters=10**9,
            stage3_max_reuse_distance=of.max_reuse_distance,
            memory_efficient_linear=True,
        )
        return with_adamw(mlp(of.layers, of.width, self.device), settings)

    def step(self, row: Row, engine: Any, data: Batch) -> Step:
        return partial(_kind(row).step, engine, data)

    def plain(self, row: Row, data: Batch) -> Callable[[Forward], None]:
        return partial(_plain, data, _kind(row).summed)

    def reduced_after(self, row: Row) -> str:
        return f"backward {_kind(row).backwards}"

    def look(self, at: Standing) -> None:
        super().look(at)
        kind, found = _kind(at.row), at.row.found
        found["gradient_error_last_alone"] = self._without_the_first(at, kind.summed)
        found["held"] = self._held(at, at.step)
        if kind.step is ordinary:
            kept = partial(ordinary, at.engine, at.data, keep_graph=True)
            found["held_graph_kept"] = self._held(at, kept)
        if self.options.profile:
            found["collectives"] = collectives.counts(at.step, self.device)

    def _without_the_first(self, at: Standing, summed: tuple[int, ...]) -> float:
        """How far the gradients would be off, had all losses been lost but the last."""
        weights = full_weights(at.engine)
        last, whole = (
            plain_gradients(weights, partial(_plain, at.data, losses))
            for losses in (summed[-1:], summed)
        )
        return relative_error(last, whole)

    def _held(self, at: Standing, step: Step) -> list[dict[str, Any]]:
        """After each backward of a step of its own.

        mib: allocated since before the engine was built; available: parameters that are gathered
        and need not be; in_flight: those whose gather has begun.
        """
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        held: list[dict[str, Any]] = []

        def look(phase: str) -> None:
            if not phase.startswith("backward"):
                return
            now, params = allocated_mib(self.device), at.engine.module.parameters()
            states = Counter(param.ds_status for param in params if not param.ds_persist)
            held.append(
                {
                    "after": phase,
                    "mib": None if now is None or at.before is None else now - at.before,
                    "available": states[ZeroParamStatus.AVAILABLE],
                    "in_flight": states[ZeroParamStatus.INFLIGHT],
                }
            )

        step(look)
        return held

    def label(self, row: Row) -> tuple[str, str]:
        return str(row["number"]), row["title"]

    def reference(self, row: Row, rows: Sequence[Row]) -> Row | None:
        """The other one with which it shares an engine."""
        return find(rows, number=_PERSISTENT if _kind(row).holds_all else _ORDINARY)

    def tables(self, rows: Sequence[Row]) -> Iterator[Table]:
        columns = [
            *self.times(rows),
            ("MiB after each backward", lambda row: _each(row, "mib")),
            ("peak MiB", value("peak_mib")),
            ("gathered after each backward", lambda row: _each(row, "available")),
            ("gradient error", error("gradient_error")),
            ("all-gathers, reduce-scatters", _counts),
        ]
        yield Table("", columns)
        ms = ("ms per phase", lambda row: phases(row.ms_by_phase))
        yield Table("phases", [ms], lambda row: row.ms)

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

    def is_drawn(self, row: Row) -> bool:
        return row["number"] in (_RETAINED, _TWO_FORWARDS)


def _kind(row: Row) -> Kind:
    return KINDS[row["number"]]


def _plain(batch: Batch, losses: Sequence[int], forward: Forward) -> None:
    """Backwards over one forward, in plain PyTorch."""
    outputs = forward(batch[0])
    for index in losses:
        loss_of(batch, outputs, index).backward(retain_graph=True)  # type: ignore[no-untyped-call]


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


def _each(row: Row, name: str) -> str:
    return ", ".join(number(held[name], 0) for held in row.get("held") or ()) or "-"


def _counts(row: Row) -> str:
    counts = row.get("collectives")
    return f"{counts['all_gather']}, {counts['reduce_scatter']}" if counts else "-"


if __name__ == "__main__":
    raise SystemExit(main(Retain))
