"""stream_safety, measured: ``torchrun --nproc-per-node 2 -m benchmarks.stream_safety [options]``.

How much of the reductions a backward hides, in a Transformer's shapes: RMSNorm, four Linear(4096),
RMSNorm, one to 16384 and one back, four times. Each row has an engine, and all stand at once.
NCCL_P2P_DISABLE=1 in the environment measures machines without direct copies between GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks import probes
from benchmarks.gradients import full_gradients, relative_error
from benchmarks.harness import main, recorded
from benchmarks.micro_steps import PHASES, MicroSteps
from benchmarks.rows import Row, groups
from benchmarks.tables import Bar, Column, Table, error, number, over, phases, value
from benchmarks.timing import wait_for
from benchmarks.trace import Shares, traced
from benchmarks.workload import PATCHED, STOCK, Standing

MODES = (STOCK, PATCHED)
OVERLAP = {"off": False, "on": True}
_STEPS = 3  # whose gradients are compared
# Where the GPUs cannot copy directly between each other, so that communication is what takes long.
_STEP = 0.90


@dataclass
class Agreement:
    """Whether two rows have computed the same numbers, to the bit.

    differing: elements whose bits are not the reference's, `of` so many.
    error: the largest relative error of a tensor; NaN if any is.
    """

    differing: int
    of: int
    error: float

    @classmethod
    def between(cls, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Agreement:
        """float32 tensors, one by one."""
        differing = sum(
            int((one.view(torch.int32) != other.view(torch.int32)).sum())
            for one, other in zip(ours, theirs, strict=True)
        )
        error = relative_error(ours, theirs) if differing else 0.0
        return cls(differing, sum(map(torch.numel, ours)), error)

    def __str__(self) -> str:
        if not self.differing:
            return "equal"
        return f"NO: {self.differing} of {self.of}, off by {self.error:.1e}"


class Reference:
    """What the rows without overlap_comm came to, by stage; the others are held against it."""

    def __init__(self) -> None:
        self._of_stage: dict[int, list[Tensor]] = {}

    def against(self, row: Row, tensors: list[Tensor]) -> dict[str, Any] | None:
        """None for the reference itself, and where there is none."""
        if not row["overlap"]:
            self._of_stage.setdefault(row["stage"], tensors)
        reference = self._of_stage.get(row["stage"])
        if reference is None or reference is tensors:
            return None
        return asdict(Agreement.between(tensors, reference))


_FULL: dict[str, Any] = {
    "stages": [1, 2],
    "batches": [256, 4096, 16384],
    "reduce_bucket_sizes": [2**24, 5 * 10**7],  # width squared, which is "auto", and large
    "micro_steps": [1, 4],
    "layers": 24,
    "width": 4096,
    "warmup": 2,
    "steps": 6,
    "rounds": 3,
}
_SMOKE = _FULL | {"batches": [8], "reduce_bucket_sizes": [10**3, 10**4], "micro_steps": [1]}
_SMOKE |= {"layers": 6, "width": 64, "warmup": 1, "steps": 1, "rounds": 2}


class StreamSafety(MicroSteps):
    __doc__ = __doc__
    name, patches = "stream_safety", ("stream_safety",)
    title = "stream_safety, all parts: patched / stock, overlap_comm"
    keys = ("stage", "overlap", "mode", "batch", "reduce_bucket_size", "micro_steps")
    shares_engine = False
    peak = staticmethod(probes.max_active_mib)
    full, smoke = _FULL, _SMOKE

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--overlap", choices=OVERLAP, nargs="+", default=list(OVERLAP))
        parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES))

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if set(options.stages) - {1, 2}:
            parser.error("the stages are 1 and 2")

    def standing_together(self) -> Iterator[list[Row]]:
        of = self.options
        for count, batch, bucket in product(of.micro_steps, of.batches, of.reduce_bucket_sizes):
            self._gradients = Reference()
            # In an order of ours: what the others are compared with comes first.
            rows = product(
                sorted(of.stages), (OVERLAP[o] for o in OVERLAP if o in of.overlap), MODES
            )
            yield [
                Row(dict(zip(self.keys, (*row, batch, bucket, count), strict=True)))
                for row in rows
                if row[-1] in of.modes
            ]

    def zero(self, row: Row) -> dict[str, Any]:
        bucket = row["reduce_bucket_size"]
        return {"reduce_bucket_size": bucket, "overlap_comm": row["overlap"]}

    def look(self, at: Standing) -> None:
        super().look(at)
        found: list[Tensor] = []

        def keep(ended: str) -> None:
            if ended == "backward":
                wait_for(self.device)  # reduction has a stream of its own
                found.extend(full_gradients(at.engine))

        for _ in range(_STEPS):
            at.step(keep)
        at.row.found["gradients"] = self._gradients.against(at.row, found)

    def end(self, stood: Sequence[Standing]) -> None:
        self._gradients = Reference()  # a copy of all gradients is let go
        ends = Reference()
        for at in stood:
            at.row.found["end"] = ends.against(at.row, _end(at.engine))
        # Last: what a profiler leaves behind in a process meets no timed step of these rows.
        for at in stood:
            with recorded(self, at.row), self.patched(at.row):
                found = traced(at.step, self.device)
                plain = {phase: asdict(shares) for phase, shares in (found or {}).items()}
                at.row.found["trace"] = plain or None

    def where(self, row: Row) -> str:
        one = f"batch {row['batch']}, bucket {row['reduce_bucket_size']:,}"
        return one if row["micro_steps"] == 1 else f"{one}, {row['micro_steps']} micro steps"

    def label(self, row: Row) -> tuple[str, str]:
        return f"Z{row['stage']} overlap" if row["overlap"] else f"Z{row['stage']}", row["mode"]

    def tables(self, rows: Sequence[Row]) -> Iterator[Table]:
        columns = [
            *self.times(rows),
            (f"ms: {', '.join(PHASES)}", lambda row: phases(row.ms_by_phase, PHASES)),
            ("peak MiB", value("peak_mib")),
            ("gradient error", error("gradient_error")),
            ("gradients as without overlap", lambda row: _agreement(row.get("gradients"))),
            ("end as without overlap", lambda row: _agreement(row.get("end"))),
        ]
        yield Table("", columns)
        yield Table("traced", _TRACE, lambda row: row.get("trace"))

    def bars(self, rows: Sequence[Row], p2p: bool) -> Iterator[Bar]:
        """Of the patched rows with overlap_comm."""
        for where, group in groups(rows, self.where):
            patched = [row for row in group if row["overlap"] and row["mode"] == PATCHED]
            for row in patched:
                bar = _STEP if row["stage"] == 2 and not p2p else None
                name = f"step, {self.label(row)[0]}, {where}: patched / stock"
                yield Bar.of_rounds(name, self.ratios(row, rows), bar)
            for row in patched:
                name = f"elements unlike overlap off, {self.label(row)[0]} patched, {where}"
                yield Bar(name, differing(row), 0)

    def is_drawn(self, row: Row) -> bool:
        return self.is_patched(row) and bool(row["overlap"])

    def line(self, row: Row) -> str:
        bucket = f"bucket {row['reduce_bucket_size'] / 1e6:.0f}M"
        steps = f", {row['micro_steps']} micro steps" * (row["micro_steps"] > 1)
        return f"Z{row['stage']}, {row['batch']} rows, {bucket}{steps}"


def differing(row: Row) -> int | None:
    """The elements that are not the reference's to the bit, in all that was compared."""
    compared = [row.get(name) for name in ("gradients", "end")]
    return None if None in compared else sum(one["differing"] for one in compared)


def _end(engine: Any) -> list[Tensor]:
    """The parameters as they are now, and AdamW's running averages of their gradients; float32."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return [
        tensor
        for param in engine.module.parameters()
        for tensor in (
            safe_get_full_fp32_param(param),
            safe_get_full_optimizer_state(param, "exp_avg"),
        )
    ]


def _agreement(found: dict[str, Any] | None) -> str:
    return "-" if found is None else str(Agreement(**found))


def _share(name: str, phase: str = "") -> Callable[[Row], str]:
    return lambda row: number(getattr(shares_of(row, phase), name), 2)


def shares_of(row: Row, phase: str = "") -> Shares:
    """Of a phase of the traced step, or of the whole."""
    names = (phase,) if phase else PHASES
    return Shares.total([Shares(**row.get("trace")[name]) for name in names])


def _hidden_part(row: Row) -> str:
    whole = shares_of(row)
    part = over(whole.hidden, whole.nccl)
    return "-" if part is None else f"{100 * part:.0f} %"


_TRACE: list[Column] = [
    ("traced ms", _share("ms")),
    ("NCCL ms", _share("nccl")),
    ("hidden", _share("hidden")),
    ("exposed", _share("exposed")),
    ("hidden part", _hidden_part),
    ("backward: traced ms", _share("ms", "backward")),
    ("NCCL ms", _share("nccl", "backward")),
    ("hidden", _share("hidden", "backward")),
    ("exposed", _share("exposed", "backward")),
    ("compute stream idle", _share("idle", "backward")),
]


if __name__ == "__main__":
    raise SystemExit(main(StreamSafety))
