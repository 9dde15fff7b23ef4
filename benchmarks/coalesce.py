"""coalesce, measured: ``torchrun --nproc-per-node 2 -m benchmarks.coalesce [options]``.

Several backwards, one gradient reduction. 8 x (Linear(4096, bias=False) + ReLU) in bf16, AdamW; a
step is N forwards and backwards over N micro batches. Rows of a stage take turns on one engine.
NCCL_P2P_DISABLE=1 in the environment measures machines without direct copies between GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

from benchmarks import probes
from benchmarks.engines import around, batches, config, loss_of, mlp
from benchmarks.harness import main
from benchmarks.probes import Forward, plain_backwards
from benchmarks.rows import Row, find, ratios
from benchmarks.tables import Bar, mib, over, phases
from benchmarks.timing import Mark, Step
from benchmarks.workload import Standing, Workload

MULTI, NATIVE = "multi", "native"
# At stage 3 they gather as native does; once, where all fits; once, whatever fits.
OURS, DEFAULT, GATHER_ONCE = "ours", "ours, default", "ours, gather_once"
AT = 4  # backwards, that the bars are about
_PLAIN, _MEMORY = 1.0, 1.0
_GATHERED_ONCE = {True: 0.75, False: 0.65}  # with and without peer-to-peer copies

MicroBatches = tuple[Tensor, ...]

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


def _boundaries(engine: Any, micro_batches: MicroBatches, mark: Mark) -> None:
    """DeepSpeed's first way: every backward but the last is said to be no boundary."""
    for number, inputs in enumerate(micro_batches, start=1):
        engine.set_gradient_accumulation_boundary(number == len(micro_batches))
        engine.backward(loss_of(engine(inputs)))
    mark("backwards")
    engine.step()
    mark("step")
    # As an engine begins: it goes by its own count again, for the row that has the next turn.
    engine._is_gradient_accumulation_boundary = None


def _block(engine: Any, micro_batches: MicroBatches, mark: Mark, **arguments: Any) -> None:
    """``coalesce_grad_reduction(**arguments)``."""
    with engine.coalesce_grad_reduction(**arguments):
        mark("enter")
        for inputs in micro_batches:
            engine.backward(loss_of(engine(inputs)))
        mark("backwards")
    mark("exit")
    engine.step()
    mark("step")


WAYS: dict[str, Callable[[Any, MicroBatches, Mark], None]] = {
    MULTI: _boundaries,
    NATIVE: _block,
    OURS: partial(_block, gather_once=False),
    DEFAULT: _block,
    GATHER_ONCE: partial(_block, gather_once=True),
}


class Coalesce(Workload):
    __doc__ = __doc__
    name, patches = "coalesce", ("coalesce",)
    keys, against = ("stage", "backwards", "batch", "mode"), NATIVE
    full, smoke = _FULL, _SMOKE
    more = (
        ("host ms", lambda row: phases(row.host_ms_by_phase)),
        ("MiB in the block", mib("window_mib")),
    )

    def standing_together(self) -> Iterator[list[Row]]:
        of = self.options
        for sizes in product(of.batches, of.backwards, of.stages):
            ways = [way for way in WAYS if sizes[-1] == 3 or way in (MULTI, NATIVE, OURS)]
            yield self.rows(*sizes[::-1], modes=ways)

    def is_patched(self, row: Row) -> bool:
        return bool(row["mode"] not in (MULTI, NATIVE))

    def data(self, row: Row) -> MicroBatches:
        return batches(row["backwards"], row["batch"], self.options.width, self.device)

    def engine(self, row: Row) -> AbstractContextManager[Any]:
        of = self.options
        settings = config(
            row["batch"], stage=row["stage"], reduce_bucket_size=of.reduce_bucket_size
        )
        return around(mlp(of.layers, of.width, self.device), settings)

    def step(self, row: Row, engine: Any, data: MicroBatches) -> Step:
        return partial(WAYS[row["mode"]], engine, data)

    def plain(self, row: Row, data: MicroBatches) -> Callable[[Forward], None]:
        return partial(plain_backwards, data, 1)

    def reduced_after(self, row: Row) -> str:
        return "backwards" if row["mode"] == MULTI else "exit"

    def look(self, at: Standing) -> None:
        super().look(at)
        held = probes.held_mib(at.step, self.device, at.before)
        at.row.found["window_mib"] = held["backwards"]

    def where(self, row: Row) -> str:
        return f"N={row['backwards']}, batch {row['batch']}"

    def label(self, row: Row) -> tuple[str, str]:
        """Some kept runs have a row of no stage, plain PyTorch's."""
        return "-" if row["stage"] is None else f"Z{row['stage']}", row["mode"]

    def bars(self, rows: Sequence[Row], p2p: bool) -> Iterator[Bar]:
        """Of the rows with four backwards at stage 3, each a ratio to native."""
        for batch in self.options.batches:
            of = {"stage": 3, "backwards": AT, "batch": batch}
            native, plain = (find(rows, **of, mode=mode) for mode in (NATIVE, OURS))
            where = f"batch {batch}"
            for name, bar in ((GATHER_ONCE, _GATHERED_ONCE[p2p]), (OURS, _PLAIN)):
                found = ratios(find(rows, **of, mode=name), native)
                yield Bar.of_rounds(f"step, Z3 {name}, {where}", found, bar)
            for what in ("window", "peak"):
                mib = (one.get(f"{what}_mib") if one else None for one in (plain, native))
                yield Bar(f"{what} memory, Z3 {OURS}, {where}", over(*mib), _MEMORY)


if __name__ == "__main__":
    raise SystemExit(main(Coalesce))
