"""Patches that have nothing to do: ``torchrun --nproc-per-node 2 -m benchmarks.at_rest [options]``.

Ordinary steps of one engine, stock and patched in turns, and stock against itself as often, which
is what a ratio is worth. Prints Markdown on rank 0, with every round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import ds_patches
from benchmarks.engines import ready
from benchmarks.micro_batches import MicroBatches, Workload, loss_of
from benchmarks.options import common, filled, kept, write
from benchmarks.provenance import provenance
from benchmarks.ranks import join, leave, must_be_started_by_torchrun, say
from benchmarks.timing import Mark, time_block

_FULL: dict[str, Any] = {
    "stages": [1, 2, 3],
    "micro_steps": [1, 4],
    "batches": [256, 4096, 16384],
    "layers": 24,
    "width": 2048,
    "warmup": 2,
    "steps": 8,
    "rounds": 7,
}
_SMOKE = _FULL | {"batches": [8], "layers": 6, "width": 64, "steps": 2, "rounds": 2}

Ratios = dict[str, list[float]]


@contextmanager
def applied(names: Sequence[str]) -> Iterator[None]:
    for name in names:
        ds_patches.apply(name)
    try:
        yield
    finally:
        ds_patches.unapply_all()


def step(engine: Any, micro_batches: MicroBatches, mark: Mark) -> None:
    for inputs in micro_batches:
        engine.backward(loss_of(engine(inputs)))
        engine.step()
    mark("step")


def measure(
    options: argparse.Namespace, workload: Workload, stage: int, device: torch.device
) -> Ratios:
    """By pair, each round's ratio: of patched to stock, and of stock to stock."""
    data = workload.data(device)

    def block(names: Sequence[str]) -> float:
        with applied(names):
            times = time_block(
                lambda mark: step(engine, data, mark), device, options.warmup, options.steps
            )
        # The slowest rank's: the others wait for it somewhere.
        found = torch.tensor(statistics.median(one.total for one in times), device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    ratios: Ratios = {"patched": [], "stock": []}
    with workload.engine(stage, device) as engine:
        block(())
        for turn in range(options.rounds):
            for pair, names in (("patched", options.patches), ("stock", ())):
                first, second = (names, ()) if turn % 2 else ((), names)
                before, after = block(first), block(second)
                ratios[pair].append(before / after if turn % 2 else after / before)
    return ratios


def main() -> int:
    """Run every combination; 0, whatever the ratios are."""
    options = _parse()
    device = join(options.device)
    origin = provenance(device, options.commit)
    say(", ".join(f"{key} {value}" for key, value in origin.items()))
    say(
        "",
        "| ZeRO | micro steps | rows | patched | stock again | patched, by round | stock again |",
    )
    say("|---" * 7 + "|")
    base = Workload(options.layers, options.width, 0, 1, options.width**2, in_blocks=True)
    rows = []
    for stage in options.stages:
        for count in options.micro_steps:
            for batch in options.batches:
                workload = replace(base, batch=batch, backwards=count, micro_steps=count)
                ratios = measure(options, workload, stage, device)
                rows.append({"stage": stage, "micro_steps": count, "batch": batch, **ratios})
                say(_row(stage, count, batch, ratios))
                if dist.get_rank() == 0:  # after each: what was measured stays
                    found = {"provenance": origin, "options": kept(options), "rows": rows}
                    write(options.json, found)
    return leave(())


def _row(stage: int, count: int, batch: int, ratios: Ratios) -> str:
    medians = [f"{statistics.median(ratios[pair]):.3f}" for pair in ("patched", "stock")]
    rounds = [" ".join(f"{one:.3f}" for one in ratios[pair]) for pair in ("patched", "stock")]
    return f"| {' | '.join(map(str, (stage, count, batch, *medians, *rounds)))} |"


def _parse() -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser("benchmarks.at_rest", description=f"{summary}\n{rest}")
    parser.add_argument("--patches", nargs="+", default=ready(), help="all, by default")
    common(parser, _FULL, _SMOKE)
    options = parser.parse_args()
    must_be_started_by_torchrun(parser)
    return filled(options, _FULL, _SMOKE)


if __name__ == "__main__":
    raise SystemExit(main())
