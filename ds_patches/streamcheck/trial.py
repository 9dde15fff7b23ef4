"""One process that trains without and with streams, and writes down what was not equal.

    python -m ds_patches.streamcheck.trial [--runs N] [--fault record|wait] RESULT

`doctor --streams` runs it; see doctor.py. RESULT is a JSON file, written anew after each run.
A fault is for tests: every hand-over to a stage leaves that out, and then runs must not be equal.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ds_patches.doctor import trials
from ds_patches.streamcheck import lanes
from ds_patches.streamcheck.comparison import first_difference
from ds_patches.streamcheck.training import Training, Work

WORK = Work()
RUNS = 30
STAGES = 4  # or more, if there are as many GPUs


def main(arguments: Sequence[str]) -> int:
    """Write what came of it; an error is a result too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--fault", choices=lanes.FAULTS, default="")
    chosen = parser.parse_args(arguments)
    with trials.leaving(chosen.result) as found:
        found |= {"torch": torch.__version__, "not_checked": _why_not()}
        if not found["not_checked"]:
            devices = _places()
            found["places"] = _named(devices)
            _check(devices, chosen.fault, chosen.runs, found, chosen.result)
    return 0


def _why_not() -> str:
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA GPU, and a CPU has no streams"
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return "CUDA_LAUNCH_BLOCKING is set, and lets no stream run beside another"
    return ""


def _places() -> list[torch.device]:
    """Return the device of each stage. One stage more than GPUs: two of them share a GPU."""
    gpus = torch.cuda.device_count()
    stages = max(STAGES, gpus + 1)
    return [torch.device("cuda", stage * gpus // stages) for stage in range(stages)]


def _named(devices: Sequence[torch.device]) -> str:
    names = Counter(torch.cuda.get_device_name(device) for device in dict.fromkeys(devices))
    gpus = ", ".join(f"{count} x {name}" for name, count in names.items())
    return f"{len(devices)} stages on {gpus}"


def _check(
    devices: Sequence[torch.device], fault: str, runs: int, found: dict[str, Any], result: Path
) -> None:
    # Else cuBLAS may choose its way by the workspace that is free, and the bits with it.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    training = Training(WORK, devices)
    without, streamed = lanes.plain(devices), lanes.streamed(devices, fault)
    expected = training.run(without)
    found |= {"runs": 0, "of": runs, "equal": 0, "first": ""}
    found["unsteady"] = first_difference(expected, training.run(without))
    if found["unsteady"]:
        return
    for run in range(1, runs + 1):
        difference = first_difference(expected, training.run(streamed))
        found["runs"] = run
        found["equal"] += not difference
        if difference and not found["first"]:
            found["first"] = f"run {run}: {difference}"
        trials.leave(found, result)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
