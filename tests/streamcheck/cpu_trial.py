"""The trial of `doctor --streams` on a CPU, small, with what can come of it.

    python -m tests.streamcheck.cpu_trial WHAT [--runs N] RESULT

WHAT: "equal", "differs" in runs 2 and 3, "unsteady" without streams too, or it "crashes", "raises"
or "hangs" in run 2.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import count

from ds_patches.streamcheck import lanes, trial
from ds_patches.streamcheck.lanes import Lanes
from ds_patches.streamcheck.training import Quantity, Training
from tests.streamcheck.small import CPU, WORK

what, *arguments = sys.argv[1:]
train = Training.run
numbers = count(-1)  # -1 and 0 are without streams


def run(training: Training, places: Lanes) -> list[Quantity]:
    seen, number = train(training, places), next(numbers)
    if (what == "differs" and number in (2, 3)) or (what == "unsteady" and number == 0):
        seen[6].value[0, 0] += 0.25
    if number == 2 and what == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 2 and what == "raises":
        raise RuntimeError("CUDA error: unspecified launch failure\nand more of it")
    if number == 2 and what == "hangs":
        time.sleep(600)
    return seen


Training.run = run
trial.WORK = WORK
trial._why_not = lambda: ""
trial._places = lambda: CPU
trial._named = lambda devices: f"{len(devices)} stages on a CPU"
lanes.streamed = lambda devices, fault: lanes.plain(devices)
sys.exit(trial.main(arguments))
