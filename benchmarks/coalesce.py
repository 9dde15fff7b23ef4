"""coalesce, measured: ``torchrun --nproc-per-node 2 -m benchmarks.coalesce [options]``.

Several backwards, one gradient reduction. 8 x (Linear(4096, bias=False) + ReLU) in bf16, AdamW; a
step is N forwards and backwards over N micro batches. Rows of a stage take turns on one engine.
NCCL_P2P_DISABLE=1 in the environment measures machines without direct copies between GPUs.
"""

from __future__ import annotations

import argparse
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks import collectives, probes
from benchmarks.engines import batches, config, engine_around, free, mlp, with_adamw
from benchmarks.gradients import Forward, plain_backwards, relative_error
from benchmarks.harness import main
from benchmarks.rows import Row, like, ratios
from benchmarks.tables import Bar, Table, error, number, over, phases, value
from benchmarks.timing import Step, ignore
from benchmarks.windows import FLOOR, GATHER_ONCE, MODES, NATIVE, OURS, PHASES, Floor, MicroBatches
from benchmarks.workload import Standing, Workload, is_off

AT = 4  # backwards, that the bars are about
_BYTES, _DEFAULT, _MEMORY = 0.5, 1.0, 1.0
_GATHERED_ONCE = {True: 0.75, False: 0.65}  # with and without peer-to-peer copies
_STEPS = 3  # after which the parameters are compared

_FULL: dict[str, Any] = {
    "stages": [1, 2, 3],
    "backwards": [2, 4, 8],
    "batches": [256, 4096],
    "layers": 8,
    "width": 4096,
    "reduce_bucket_size": 5 * 10**8,
    "warmup": 2,
    "steps": 6,
    "rounds": 15,
}
_SMOKE = _FULL | {"backwards": [2, 4], "batches": [8], "layers": 2, "width": 64}
_SMOKE |= {"reduce_bucket_size": 10**4, "warmup": 1, "steps": 1, "rounds": 2}


class Coalesce(Workload):
    __doc__ = __doc__
    name, patches = "coalesce", ("coalesce",)
    title = "coalesce: 4 backwards in a block / DeepSpeed's own block"
    keys, against = ("stage", "backwards", "batch", "mode"), NATIVE
    full, smoke = _FULL, _SMOKE

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._ends: dict[tuple[int, int], dict[str, Row]] = {}

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if set(options.stages) - {1, 2, 3}:
            parser.error("the stages are 1, 2 and 3")

    def standing_together(self) -> Iterator[list[Row]]:
        for batch, backwards in product(self.options.batches, self.options.backwards):
            sizes = {"backwards": backwards, "batch": batch}
            yield [Row({"stage": None, **sizes, "mode": FLOOR})]
            for stage in self.options.stages:
                modes = [name for name, mode in MODES.items() if stage in mode.stages]
                yield [Row({"stage": stage, **sizes, "mode": name}) for name in modes]

    def is_patched(self, row: Row) -> bool:
        return bool(row["mode"] in (OURS, GATHER_ONCE))

    def data(self, row: Row) -> MicroBatches:
        return batches(row["backwards"], row["batch"], self.options.width, self.device)

    def engine(self, row: Row) -> AbstractContextManager[Any]:
        if row["stage"] is None:
            return nullcontext()
        return with_adamw(self._model(), self._config(row))

    def step(self, row: Row, engine: Any, data: MicroBatches) -> Step:
        if engine is None:
            return partial(Floor(self._model(), self.device).step, data)
        return partial(MODES[row["mode"]].step, engine, data)

    def plain(self, row: Row, data: MicroBatches) -> Callable[[Forward], None] | None:
        return None if row["stage"] is None else partial(plain_backwards, data, 1)

    def reduced_after(self, row: Row) -> str:
        return MODES[row["mode"]].reduced

    def prepare(self, rows: Sequence[Row]) -> None:
        """Train with each from one start, on an engine of its own: one that raises leaves none."""
        if rows[0]["stage"] is None:
            return
        key = rows[0]["stage"], rows[0]["backwards"]
        if key not in self._ends:
            self._ends[key] = self._compared(rows)
        for row in rows:
            end = self._ends[key][row["mode"]]
            row.error, row.found["parameter_error"] = end.error, end.get("parameter_error")

    def _compared(self, rows: Sequence[Row]) -> dict[str, Row]:
        """parameter_error: how far from native's parameters, over the way that these went."""
        ends = {row["mode"]: Row(row.of) for row in rows}
        native: list[Tensor] | None = None
        # Native first: the others are compared as they come, and two copies of a model are enough.
        for end in sorted(ends.values(), key=lambda end: end["mode"] != NATIVE):
            try:
                update = self._update(end)
            except Exception as raised:
                end.fail(raised)
                if not self.may_fail(end):
                    traceback.print_exc()
            else:
                native = update if end["mode"] == NATIVE else native
                if native is not None:
                    end.found["parameter_error"] = relative_error(update, native)
            free(self.device)
        return ends

    def _update(self, row: Row) -> list[Tensor]:
        """How far each parameter moved in a few steps; float32.

        With SGD, whose parameters follow the size of a gradient; Adam divides it away.
        """
        from deepspeed.utils import safe_get_full_fp32_param

        model, micro_batches = self._model(), self.data(row)
        start = [param.detach().float() for param in self._model().parameters()]
        # The loss is a mean over `width` outputs, so a gradient shrinks as the model grows.
        optimizer = torch.optim.SGD(model.parameters(), lr=2e-5 * self.options.width)
        with self.patched(row), engine_around(model, optimizer, self._config(row)) as engine:
            for _ in range(_STEPS):
                MODES[row["mode"]].step(engine, micro_batches, ignore)
            return [
                safe_get_full_fp32_param(param).to(self.device) - origin
                for param, origin in zip(engine.module.parameters(), start, strict=True)
            ]

    def look(self, at: Standing) -> None:
        super().look(at)
        found = at.row.found
        found["sent"] = [asdict(one) for one in collectives.sent(at.step)]
        found["collectives"] = collectives.counts(at.step, self.device)
        found["window_mib"] = probes.allocated_after(at.step, "backwards", self.device, at.before)

    def _model(self) -> torch.nn.Module:
        return mlp(self.options.layers, self.options.width, self.device)

    def _config(self, row: Row) -> dict[str, Any]:
        bucket = self.options.reduce_bucket_size
        return config(row["batch"], stage=row["stage"], reduce_bucket_size=bucket)

    def where(self, row: Row) -> str:
        return f"N={row['backwards']}, batch {row['batch']}"

    def label(self, row: Row) -> tuple[str, str]:
        return "-" if row["stage"] is None else f"Z{row['stage']}", row["mode"]

    def reference(self, row: Row, rows: Sequence[Row]) -> Row | None:
        """None of the floor."""
        return like(rows, row, mode=NATIVE)

    def tables(self, rows: Sequence[Row]) -> Iterator[Table]:
        times = [
            *self.times(rows),
            (f"host ms: {', '.join(PHASES)}", lambda row: phases(row.host_ms_by_phase, PHASES)),
            ("gradient error", error("gradient_error")),
            ("parameter error", error("parameter_error")),
        ]
        yield Table("", times)
        sent = [
            ("collectives", _collectives),
            ("MiB sent in reductions", lambda row: number(sent_mib(row, reductions=True), 2)),
            ("MiB sent in all", lambda row: number(sent_mib(row), 2)),
            ("MiB in the window", value("window_mib")),
            ("peak MiB", value("peak_mib")),
        ]
        yield Table("wire and memory", sent)

    def bars(self, rows: Sequence[Row], p2p: bool) -> Iterator[Bar]:
        """Of the rows with four backwards, each a ratio to native."""
        for batch in self.options.batches:

            def pair(stage: int, mode: str, batch: int = batch) -> tuple[Row | None, Row | None]:
                of = Row({"stage": stage, "backwards": AT, "batch": batch, "mode": mode})
                return like(rows, of), like(rows, of, mode=NATIVE)

            where = f"batch {batch}"
            for stage in (1, 2):
                sent = (sent_mib(one, reductions=True) for one in pair(stage, OURS))
                yield Bar(f"reduction bytes, Z{stage} {OURS}, {where}", over(*sent), _BYTES)
            for mode, bar in ((GATHER_ONCE, _GATHERED_ONCE[p2p]), (OURS, _DEFAULT)):
                yield Bar.of_rounds(f"step, Z3 {mode}, {where}", ratios(*pair(3, mode)), bar)
            for what, name in (("window", "window_mib"), ("peak", "peak_mib")):
                mib = (one.get(name) if one else None for one in pair(3, OURS))
                yield Bar(f"{what} memory, Z3 {OURS}, {where}", over(*mib), _MEMORY)

    def may_fail(self, row: Row) -> bool:
        crash = MODES[row["mode"]].crash if row["mode"] in MODES else ""
        return bool(crash) and crash in (row.error or "")

    def wrong(self, row: Row) -> Iterator[str]:
        if row["stage"] is not None or row.error is not None:
            yield from super().wrong(row)
        if row.error is not None:
            return
        if row["stage"] is not None and is_off(off := row.get("parameter_error")):
            yield f"parameters are off by {off}"
        calls = Counter(one["kind"] for one in row.get("sent"))
        for kind in collectives.REDUCTIONS:
            if calls[kind] != (ran := row.get("collectives").get(kind, 0)):
                yield f"{ran} {kind} ran, {calls[kind]} were seen: its bytes are off"

    def is_drawn(self, row: Row) -> bool:
        return self.is_patched(row) and bool(row["backwards"] == AT)

    def line(self, row: Row) -> str:
        return f"{' '.join(self.label(row))}, {row['batch']} rows"


def sent_mib(row: Row | None, *, reductions: bool = False) -> float | None:
    """MiB that a rank sends in a step, or in the reductions before ``engine.step()``.

    What the step itself reduces are norms and flags, of a few bytes.
    """
    if row is None or not row.get("sent"):
        return None
    kinds = collectives.REDUCTIONS
    whole = [one for one in row.get("sent") if one["kind"] in kinds and one["phase"] != "step"]
    return float(sum(one["bytes"] for one in (whole if reductions else row.get("sent"))) / 2**20)


def _collectives(row: Row) -> str:
    """The kernels that ran; where the calls are another number, as in a group, those as well."""
    calls = Counter(one["kind"] for one in row.get("sent") or ())
    return (
        ", ".join(
            f"{kind} {count}" + ("" if calls[kind] == count else f" ({calls[kind]} calls)")
            for kind, count in sorted((row.get("collectives") or {}).items())
        )
        or "-"
    )


if __name__ == "__main__":
    raise SystemExit(main(Coalesce))
