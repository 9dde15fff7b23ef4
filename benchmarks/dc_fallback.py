"""dc_fallback, measured: ``python -m benchmarks.dc_fallback [options]``, without torchrun.

DeepCompile under ZeRO-3 and the frames that Dynamo skips: eager, stock and patched; nothing, half
of the layers or the whole forward skipped. DeepCompile keeps hooks, registries and compiled code
for the whole process, so each row runs in processes of its own. On CPU there is eager alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import trained
from benchmarks.engines import SEED, config, free
from benchmarks.harness import main
from benchmarks.options import positive
from benchmarks.probes import max_allocated_mib
from benchmarks.rows import Row, Run, find, like, ratios
from benchmarks.skipping import ALL, COUNTS, HALF, NOTHING, SKIPPED, dynamo_counts, model
from benchmarks.tables import Bar, Column, Table, middle, number, over, phases
from benchmarks.timing import Mark, Step, StepTimes, ignore, time_block
from benchmarks.trained import Difference
from benchmarks.workload import PATCHED, STOCK, Series, Standing, Workload

EAGER = "eager"
MODES = (EAGER, STOCK, PATCHED)  # eager first: what the others are compared with
PHASES = ("forward", "backward", "step")
_LEARNING_RATE = 1e-4
_SETTLE = 3  # steps: the comparison has emptied the allocator's cache
_PEAK_STEPS = 3
_IDLE, _HALF, _PEAK, _COMPILATIONS = 1.01, 1.0, 1.10, 1.0
_LOSSES = 6  # that a table shows

Peak = dict[str, float]  # MiB allocated at most in one `whole` step, and until its `backward` ended


_FULL: dict[str, Any] = {
    "ranks": 2,
    "layers": 8,
    "width": 2048,
    "words": 4096,
    "batch": 4,
    "tokens": 512,
    "warmup": 10,  # DeepCompile compiles at steps 0 and 5
    "steps": 40,
    "rounds": 3,
}
_SMOKE = _FULL | {"layers": 2, "width": 32, "words": 64, "batch": 2, "tokens": 8}
_SMOKE |= {"warmup": 3, "steps": 2, "rounds": 1}


class DcFallback(Workload):
    __doc__ = __doc__
    name, patches, title = (
        "dc_fallback",
        ("dc_fallback",),
        "dc_fallback: DeepCompile, skipped frames",
    )
    keys, heads, against = ("mode", "skipped"), ("skipped", "mode"), EAGER
    shares_engine, own_processes = False, True
    full, smoke = _FULL, _SMOKE

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--modes", choices=MODES, nargs="+", help="all on CUDA, eager on CPU")
        parser.add_argument("--skipped", choices=SKIPPED, nargs="+", default=list(SKIPPED))
        parser.add_argument("--reduce-bucket-size", type=positive, help="elements")
        parser.add_argument("--seconds", type=positive, default=300, help="that a row may take")
        parser.add_argument("--reference", type=Path, help="what eager trained; made if missing")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if options.modes is None:
            options.modes = [EAGER] if options.device == "cpu" else list(MODES)
        if options.device == "cpu" and options.modes != [EAGER]:
            parser.error(f"DeepCompile needs CUDA; on CPU there is --modes {EAGER}")
        if "LOCAL_RANK" in os.environ and len(options.modes) * len(options.skipped) > 1:
            parser.error("start it without torchrun: no two rows share a process")

    def chosen(self, row: Row) -> dict[str, Any]:
        return {"modes": row["mode"], "skipped": row["skipped"]}

    def standing_together(self) -> Iterator[list[Row]]:
        # In an order of ours: whatever is compared with eager has to come after it.
        for skipped in SKIPPED:
            for mode in MODES:
                if skipped in self.options.skipped and mode in self.options.modes:
                    yield [Row({"mode": mode, "skipped": skipped})]

    def data(self, row: Row) -> tuple[Tensor, Tensor]:
        """This rank's tokens and targets; every rank has its own."""
        of = self.options
        generator = torch.Generator(self.device).manual_seed(SEED + 1 + dist.get_rank())
        shape = (2, of.batch, of.tokens)
        found = torch.randint(of.words, shape, generator=generator, device=self.device)
        return found[0], found[1]

    @contextmanager
    def engine(self, row: Row) -> Iterator[Any]:
        """A ``DeepSpeedEngine``, compiled unless eager."""
        import deepspeed

        of, compiled = self.options, row["mode"] != EAGER
        made = model(row["skipped"], of.layers, of.width, of.words, self.device)
        self._starts = trained.starts(made)
        optimizer = torch.optim.AdamW(made.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
        # DeepSpeed's default of 1 GB is more than all the rest of this model takes.
        bucket = of.reduce_bucket_size or of.width * max(of.width, of.words)
        settings = config(of.batch, stage=3, reduce_bucket_size=bucket)
        settings |= {"compile": {"deepcompile": True}} if compiled else {}
        engine, *_ = deepspeed.initialize(model=made, optimizer=optimizer, config=settings)
        if compiled:
            engine.compile()
        yield engine
        engine.destroy()

    def step(self, row: Row, engine: Any, data: tuple[Tensor, Tensor]) -> Step:
        def step(mark: Mark) -> None:
            loss = engine(*data)
            mark("forward")
            engine.backward(loss)
            mark("backward")
            self._loss = loss.detach()
            del loss
            engine.step()
            mark("step")

        return step

    def look(self, at: Standing) -> None:
        """The first steps, and whether these trained the model. Lists have a value a round."""
        found, peaks, losses = at.row.found, [], []
        for _ in range(self.options.warmup):
            peaks.append(self._peak(at))
            losses.append(self._loss.item())
        found["losses"], found["first_peaks"] = [losses], [[peak for peak in peaks if peak]]
        found["compilations"] = [dynamo_counts()]
        found["differences"] = [self._differences(at)]
        free(self.device)

    def time(self, at: Standing) -> list[StepTimes]:
        return time_block(at.step, self.device, _SETTLE, self.options.steps)

    def end(self, stood: Sequence[Standing]) -> None:
        for at in stood:
            found = at.row.found
            peaks = [peak for _ in range(_PEAK_STEPS) if (peak := self._peak(at))]
            found["peak"] = [_most(peaks)]
            later = dynamo_counts()["graphs"] - found["compilations"][0]["graphs"]
            found["recompilations"] = [later]

    def _peak(self, at: Standing) -> Peak | None:
        """One step, and the most that it held, above what was there before the engine."""
        before = at.before
        if before is None:
            at.step(ignore)
            return None
        until: dict[str, float] = {}

        def look(phase: str) -> None:
            until[phase] = max_allocated_mib(self.device) - before

        torch.cuda.reset_peak_memory_stats(self.device)
        at.step(look)
        return {"whole": until["step"], "backward": until["backward"]}

    def _differences(self, at: Standing) -> dict[str, Any] | None:
        """To what the first eager row keeps for the others; None: not compared."""
        path = self.options.reference
        if path is None:
            return None
        now = trained.trained(at.engine, self._starts)
        if path.exists():
            found = trained.differences(now, path, self.device)
            return {name: asdict(one) for name, one in found.items()}
        if at.row["mode"] == EAGER:
            trained.keep(now, path)
        return None

    def label(self, row: Row) -> tuple[str, str]:
        return row["skipped"], row["mode"]

    def named(self, row: Row) -> str:
        return f"{row['mode']}, {row['skipped']} skipped"

    def reference(self, row: Row, rows: Sequence[Row]) -> Row | None:
        return like(rows, row, mode=EAGER)

    def tables(self, rows: Sequence[Row]) -> Iterator[Table]:
        ms, over_eager, by_round = self.times(rows)

        def over_stock(row: Row) -> str:
            return "-" if row["mode"] == STOCK else middle(ratios(row, like(rows, row, mode=STOCK)))

        times = [ms, over_eager, ("/ stock", over_stock), by_round]
        times += [
            ("ms: forward, backward, step", lambda row: phases(row.ms_by_phase, PHASES)),
            ("trains", _trains),
        ]
        yield Table("", times)
        yield Table("memory", [*_memory(rows), *_COMPILED], _ran)
        yield Table("training", _TRAINING, _ran)

    def bars(self, rows: Sequence[Row], p2p: bool) -> Iterator[Bar]:
        def both(skipped: str, base: str) -> tuple[Row | None, Row | None]:
            pair = (find(rows, mode=mode, skipped=skipped) for mode in (PATCHED, base))
            ours, theirs = (None if row is None or row.error else row for row in pair)
            return ours, theirs

        for skipped, base, bar in (
            (NOTHING, STOCK, _IDLE),
            (HALF, EAGER, _HALF),
            (ALL, EAGER, None),
        ):
            name = f"step, {skipped} skipped: patched / {base}"
            yield Bar.of_rounds(name, ratios(*both(skipped, base)), bar)
        for name, peak in _PEAKS.items():
            mib = (peak(row) if row else None for row in both(ALL, EAGER))
            yield Bar(f"{name}, all skipped: patched / eager", over(*mib), _PEAK)
        for skipped in (NOTHING, HALF):
            graphs = (_graphs(row) if row else None for row in both(skipped, STOCK))
            name = f"compilations, {skipped} skipped: patched / stock"
            yield Bar(name, over(*graphs), _COMPILATIONS)

    def may_fail(self, row: Row) -> bool:
        """Stock raises or trains wrong where a frame is skipped: what the patch is for."""
        return bool(row["mode"] == STOCK and row["skipped"] != NOTHING)

    def wrong(self, row: Row) -> Iterator[str]:
        found = trained.of_row(row)
        if self.may_fail(row):
            return
        if row.error is not None:
            yield row.error
        elif found is None:
            if row["mode"] != EAGER:
                yield "not compared with eager ZeRO-3"
        elif lost := trained.untrained(row):
            yield f"does not train {', '.join(lost)} as eager ZeRO-3 does"
        elif not (worst := Difference.worst(found.values())).has_gradients:
            yield f"gradients are off by {worst.gradient}"

    def series(self, run: Run) -> Iterator[Series]:
        """A time of a step that does not train is no time of a step."""
        rows = self.read(run)
        for row in rows:
            for base in MODES[: MODES.index(row["mode"])]:
                found = ratios(row, like(rows, row, mode=base))
                lost = "does not train" if trained.untrained(row) else ""
                note = "raises" if row.error else lost
                name = f"{row['skipped']} skipped, {row['mode']} over {base}"
                if base == EAGER or row["skipped"] == NOTHING:
                    yield Series(name, [] if note else found, row["mode"] == PATCHED, note=note)


def _most(peaks: Sequence[Peak]) -> Peak | None:
    if not peaks:
        return None
    return {name: max(peak[name] for peak in peaks) for name in ("whole", "backward")}


def _peak_of(row: Row) -> Peak | None:
    """Of a step like any other."""
    return _most([peak for peak in row.get("peak") or () if peak])


def _peak_from_the_first(row: Row) -> float | None:
    """Of any step, from the very first."""
    first = [peak for peaks in row.get("first_peaks") or () for peak in peaks]
    last = _peak_of(row)
    return max(peak["whole"] for peak in (*first, last)) if last else None


_PEAKS: dict[str, Callable[[Row], float | None]] = {
    "peak": lambda row: (_peak_of(row) or {}).get("whole"),
    "peak of forward and backward": lambda row: (_peak_of(row) or {}).get("backward"),
    "peak from the first step on": _peak_from_the_first,
}


def _memory(rows: Sequence[Row]) -> Iterator[Column]:
    def over_eager(peak: Callable[[Row], float | None], row: Row) -> str:
        eager = like(rows, row, mode=EAGER)
        return number(over(peak(row), peak(eager) if eager else None), 3)

    def mib(peak: Callable[[Row], float | None], row: Row) -> str:
        return number(peak(row), 0)

    for name, peak in _PEAKS.items():
        yield f"{name}, MiB", partial(mib, peak)
        yield "/ eager", partial(over_eager, peak)


def _graphs(row: Row) -> int | None:
    """Of the round with the most."""
    counted = zip(row.get("compilations") or (), row.get("recompilations") or (), strict=False)
    return max((one["graphs"] + later for one, later in counted if one), default=None)


def _trains(row: Row) -> str:
    if row.error:
        return "-"
    if (found := trained.of_row(row)) is None:
        return "reference" if row["mode"] == EAGER else "not compared"
    lost = len(trained.untrained(row))
    return f"NO: not {lost} of {len(found)} parameters" if lost else "yes"


def _ran(row: Row) -> bool:
    return row.error is None


def _several(counts: Iterable[Any]) -> str:
    """One number where all rounds agree."""
    return ", ".join(map(str, sorted(set(counts)))) or "-"


_COMPILED: list[Column] = [
    *(
        (
            name.replace("_", " "),
            lambda row, name=name: _several(c[name] for c in row.get("compilations") if c),
        )
        for name in COUNTS
    ),
    ("graphs compiled later", lambda row: _several(row.get("recompilations"))),
]
_TRAINING: list[Column] = [
    (
        f"loss of the first {_LOSSES} steps",
        lambda row: " ".join(f"{loss:.4f}" for loss in row.get("losses")[0][:_LOSSES]) or "-",
    ),
    ("update norm off by", trained.worst(0)),
    ("update off by", trained.worst(1)),
    ("gradients off by", trained.worst(2)),
    ("not trained as in eager", trained.lost),
]


if __name__ == "__main__":
    raise SystemExit(main(DcFallback))
