"""One row in a process group of its own: what ``python -m benchmarks.dc_fallback`` starts.

DeepCompile keeps hooks, registries and compiled code for the whole process, so no two rows share
one.
"""

from __future__ import annotations

import argparse
import traceback
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from benchmarks.dc_fallback.measure import Bench
from benchmarks.dc_fallback.results import Measured
from benchmarks.dc_fallback.rows import MODES, PATCH, PATCHED, SIZES, SKIPPED
from benchmarks.dc_fallback.workload import Workload
from benchmarks.engines import patch
from benchmarks.options import of_any_run, positive, write
from benchmarks.provenance import provenance
from benchmarks.ranks import join, must_be_started_by_torchrun


def main() -> int:
    """Measure and keep it; 0 if nothing raised."""
    options = _parse()
    device = join(options.device)
    workload = Workload(**{name: getattr(options, name) for name in SIZES})
    bench = Bench(workload, device, options.warmup, options.steps, options.reference)
    measured = Measured(options.mode, options.skipped)
    measured.provenance = provenance(device, options.commit)
    try:
        # The launcher sees to it that nothing is applied in the others.
        with patch(PATCH, True) if options.mode == PATCHED else nullcontext():
            bench.measure(measured)
    except Exception as error:
        traceback.print_exc()
        measured.error = f"{type(error).__name__}: {error}"
    if dist.get_rank() == 0:
        write(options.json, asdict(measured))
    if measured.error is not None:
        return 1  # a group that broke off in the middle need not come down in order
    dist.destroy_process_group()
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.dc_fallback.row", description=__doc__)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--skipped", choices=SKIPPED, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    for name in (*SIZES, "warmup", "steps"):
        needed = name != "reduce_bucket_size"
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, required=needed)
    parser.add_argument("--reference", type=Path, help="what eager trained; written if missing")
    of_any_run(parser)
    options = parser.parse_args()
    must_be_started_by_torchrun(parser)
    return options


if __name__ == "__main__":
    raise SystemExit(main())
