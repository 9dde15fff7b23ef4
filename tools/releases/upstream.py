"""DeepSpeed's own unit tests, on a stock and on a patched release: what differs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.releases import ROOT, install_one, say
from tools.releases.run import environment

#: Of a checkout's tests: those that train.
FOLDERS = ("unit/runtime", "unit/v1/zero", "unit/v1/half_precision", "unit/checkpoint", "unit/moe")
HUNG = 120  # seconds
#: What tests on GPUs load. A test that is ended in the middle of it would lock the others.
BUILD = """
from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder
CPUAdamBuilder().load(), FusedAdamBuilder().load()
"""
SIDES = {"stock": (), "patched": (sys.executable, "-m", "ds_patches", "run", "--")}
_NO_SYNC = "no_sync() works at ZeRO 2 and 3, where stock refuses it"
_SPY = "it counts calls of a private function, in whose place the patch has its own"
#: Tests that fail on a patched DeepSpeed and are to: a part of their names, and why.
BY_DESIGN = {
    "TestNoSyncCtxt::test_zero_stage[2-": _NO_SYNC,
    "TestNoSyncCtxt::test_zero_stage[3-": _NO_SYNC,
    "test_non_reentrant_single_count_call": _SPY,
    "test_micro_step_id_is_zero_at_flush": _SPY,
}


def upstream(
    checkout: Path, version: str, sample: int, salt: str, only: Sequence[str], device: str
) -> int:
    """Run the unit tests of a checkout on a release; 1 if one differs that is not to.

    sample: how many of those that are collected; 0 for all. only: files or folders of the tests.
    device: "cpu" or "cuda".
    """
    if not install_one(version):
        return 1
    of_tests = environment(version) | {"DS_ACCELERATOR": device}
    if device == "cuda":
        subprocess.run([sys.executable, "-c", BUILD], env=of_tests, check=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(SIDES)) as pool:
        # Away from the checkout: its conftest puts what lies beside its tests before the release.
        tests = Path(shutil.copytree(checkout / "tests", Path(scratch, "tests")))
        paths = [path for path in only or FOLDERS if (tests / path).exists()]
        of_tests |= {"JUDGED_SAMPLE": str(sample), "JUDGED_SALT": salt}

        def run(side: str) -> dict[str, tuple[str, str]]:
            return _run(tests, paths, side, of_tests)

        stock, patched = pool.map(run, SIDES)
    counted = Counter(outcome for outcome, _ in stock.values())
    say(f"DeepSpeed {version}, {device}, {len(stock)} tests on stock: {dict(counted)}")
    unlike = [
        name
        for name in sorted({*stock, *patched})
        if _outcome(stock, name) != _outcome(patched, name)
    ]
    strange = 0
    for name in unlike:
        why = next((why for part, why in BY_DESIGN.items() if part in name), "")
        strange += not why
        say(
            f"{name}\n  stock: {stock.get(name)}\n  patched: {patched.get(name)}\n  {why or 'WHY?'}"
        )
    say(f"{len(unlike)} differ, {len(unlike) - strange} of them by design")
    return int(bool(strange) or not counted["passed"])


def _outcome(outcomes: dict[str, tuple[str, str]], name: str) -> str:
    return outcomes.get(name, ("not run", ""))[0]


def _run(
    tests: Path, paths: Sequence[str], side: str, variables: dict[str, str]
) -> dict[str, tuple[str, str]]:
    """Return the outcome of each test. One that hangs is ended, and pytest starts behind it."""
    log = tests.with_name(side)
    # LOCAL_SIZE: how many devices the CPU is.
    own = variables | {"JUDGED_LOG": str(log), "LOCAL_SIZE": "2"}
    own["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    words = ("-m", "pytest", "-q", "-p", "tools.releases.judged", "-p", "no:cacheprovider")
    began = -1
    while began < (began := len(_noted(log))):
        with log.with_suffix(".out").open("ab") as out, subprocess.Popen(
            [*SIDES[side], sys.executable, *words, "--continue-on-collection-errors", *paths],
            cwd=tests, env=own, stdout=out, stderr=out, start_new_session=True,
        ) as pytest:  # fmt: skip
            latest = time.time()
            while pytest.poll() is None:
                time.sleep(1)
                latest = max(latest, log.stat().st_mtime if log.exists() else 0)
                if time.time() > latest + HUNG:
                    os.killpg(pytest.pid, signal.SIGKILL)
    if not began:
        say(log.with_suffix(".out").read_text("utf-8", errors="replace")[-3000:])
    return _noted(log)


def _noted(log: Path) -> dict[str, tuple[str, str]]:
    """The outcome and message of each test that began: the last that was noted."""
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    return {name: (outcome, message) for name, outcome, message in map(json.loads, lines)}
