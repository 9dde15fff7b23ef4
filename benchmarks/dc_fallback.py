"""dc_fallback, measured: ``python -m benchmarks.dc_fallback [options]``, without torchrun.

DeepCompile under ZeRO-3 and the frames that Dynamo skips: eager, stock and patched; nothing, half
of the layers or the whole forward skipped. DeepCompile keeps hooks, registries and compiled code
for the whole process, so each row runs in processes of its own. On CPU there is eager alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import compiled, probes
from benchmarks.compiled import ALL, HALF, NOTHING, SKIPPED, graphs, model
from benchmarks.engines import SEED, config, free
from benchmarks.harness import main
from benchmarks.rows import Row, find, like, ratios
from benchmarks.tables import Bar, Column, middle, number, off_by, over, phases
from benchmarks.timing import Block, Mark, Step, ignore, time_block
from benchmarks.workload import PATCHED, STOCK, Standing, Workload

EAGER = "eager"
MODES = (EAGER, STOCK, PATCHED)  # eager first: what the others are compared with
_LEARNING_RATE = 1e-4
_SETTLE = 3  # steps: the comparison has emptied the allocator's cache
_IDLE, _HALF, _PEAK, _COMPILATIONS = 1.01, 1.0, 1.10, 1.0

_FULL: dict[str, Any] = {
    "modes": list(MODES),
    "skipped": list(SKIPPED),
    "seconds": 300,  # that a row may take
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
_SMOKE = _FULL | {"modes": [EAGER], "layers": 2, "width": 32, "words": 64, "batch": 2, "tokens": 8}
_SMOKE |= {"warmup": 3, "steps": 2, "rounds": 1}


class DcFallback(Workload):
    __doc__ = __doc__
    name, patches = "dc_fallback", ("dc_fallback",)
    keys, heads, against = ("skipped", "mode"), ("skipped", "mode"), EAGER
    own_processes = True
    full, smoke, named_by_words = _FULL, _SMOKE, ("modes", "skipped")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if options.device == "cpu" and options.modes != [EAGER]:
            parser.error(f"DeepCompile needs CUDA; on CPU there is --modes {EAGER}")
        if "LOCAL_RANK" in os.environ and options.reference is None:
            parser.error("start it without torchrun: no two rows share a process")

    def chosen(self, row: Row) -> dict[str, Any]:
        return {"modes": row["mode"], "skipped": row["skipped"]}

    def standing_together(self) -> Iterator[list[Row]]:
        # In an order of ours: whatever is compared with eager has to come after it.
        for skipped, mode in product(SKIPPED, MODES):
            if skipped in self.options.skipped and mode in self.options.modes:
                yield self.rows(skipped, modes=[mode])

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

        of, compiling = self.options, row["mode"] != EAGER
        made = model(row["skipped"], of.layers, of.width, of.words, self.device)
        optimizer = torch.optim.AdamW(made.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
        # DeepSpeed's default of 1 GB is more than all the rest of this model takes.
        settings = config(of.batch, stage=3, reduce_bucket_size=of.width * max(of.width, of.words))
        settings |= {"compile": {"deepcompile": True}} if compiling else {}
        with self.patched(row):
            engine, *_ = deepspeed.initialize(model=made, optimizer=optimizer, config=settings)
            if compiling:
                engine.compile()
            yield engine
            engine.destroy()

    def step(self, row: Row, engine: Any, data: tuple[Tensor, Tensor]) -> Step:
        def step(mark: Mark) -> None:
            loss = engine(*data)
            mark("forward")
            engine.backward(loss)
            mark("backward")
            del loss
            engine.step()
            mark("step")

        return step

    def look(self, at: Standing) -> None:
        """The first steps, and whether these trained the model. Lists have a value a round."""
        for _ in range(self.options.warmup):
            at.step(ignore)
        at.row.found["compilations"] = [{"graphs": graphs()}]
        now = compiled.averages(at.engine)
        at.row.found["differences"] = [compiled.differences(now, self.options.reference)]
        free(self.device)

    def time(self, at: Standing) -> Block:
        found = at.row.found
        block = time_block(at.step, self.device, _SETTLE, self.options.steps)
        found["peak"] = [{"whole": probes.peak_mib(at.step, self.device, at.before)}]
        found["recompilations"] = [graphs() - found["compilations"][0]["graphs"]]
        return block

    def label(self, row: Row) -> tuple[str, str]:
        return row["skipped"], row["mode"]

    def named(self, row: Row) -> str:
        return f"{row['mode']}, {row['skipped']} skipped"

    def columns(self, rows: Sequence[Row]) -> list[Column]:
        def over_stock(row: Row) -> str:
            return "-" if row["mode"] == STOCK else middle(ratios(row, like(rows, row, mode=STOCK)))

        ms, over_eager, by_round = self.times(rows)
        return [
            *(ms, over_eager, ("/ stock", over_stock), by_round),
            ("ms per phase", lambda row: phases(row.ms_by_phase)),
            ("peak MiB", lambda row: number(_peak(row), 0)),
            ("graphs", lambda row: number(_graphs(row), 0)),
            ("gradients off by", lambda row: off_by(_worst(row))),
            ("trains", _trains),
        ]

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
        mib = (_peak(row) if row else None for row in both(ALL, EAGER))
        yield Bar("peak, all skipped: patched / eager", over(*mib), _PEAK)
        for skipped in (NOTHING, HALF):
            counts = (_graphs(row) if row else None for row in both(skipped, STOCK))
            name = f"compilations, {skipped} skipped: patched / stock"
            yield Bar(name, over(*counts), _COMPILATIONS)

    def may_fail(self, row: Row) -> bool:
        """Stock raises or trains wrong where a frame is skipped: what the patch is for."""
        return bool(row["mode"] == STOCK and row["skipped"] != NOTHING)

    def wrong(self, row: Row) -> Iterator[str]:
        if self.may_fail(row):
            return
        if row.error is not None:
            yield row.error
        elif compiled.off_by(row) is None and row["mode"] != EAGER:
            yield "not compared with eager ZeRO-3"
        elif lost := compiled.lost(row):
            yield f"has other gradients of {', '.join(lost)}"


def _peak(row: Row) -> float | None:
    """The most of all rounds, in a step like any other."""
    found = [peak["whole"] for peak in row.get("peak") or () if peak]
    return max((mib for mib in found if mib is not None), default=None)


def _graphs(row: Row) -> int | None:
    """That Dynamo compiled, in the round with the most."""
    counted = zip(row.get("compilations") or (), row.get("recompilations") or (), strict=False)
    return max((one["graphs"] + later for one, later in counted if one), default=None)


def _trains(row: Row) -> str:
    if row.error:
        return "-"
    if (found := compiled.off_by(row)) is None:
        return "reference" if row["mode"] == EAGER else "not compared"
    lost = len(compiled.lost(row))
    return f"NO: not {lost} of {len(found)} parameters" if lost else "yes"


def _worst(row: Row) -> float | None:
    """Of all parameters; NaN if any is."""
    found = (compiled.off_by(row) or {}).values()
    return max(found, key=lambda off: (off != off, off), default=None)


if __name__ == "__main__":
    raise SystemExit(main(DcFallback))
