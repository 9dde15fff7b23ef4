"""DeepSpeed's own unit tests, on a stock and on a patched release: what differs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.releases import ROOT, install_one, say
from tests.releases.run import environment, python

#: Of a checkout's tests: those that train.
FOLDERS = ("unit/runtime", "unit/v1/zero", "unit/v1/half_precision", "unit/checkpoint", "unit/moe")
HUNG = "120"  # seconds
#: What tests compile, for minutes: before them, as one that is ended meanwhile locks the others.
BUILT = """
from deepspeed.accelerator import get_accelerator
for name in ("CPUAdamBuilder", "FusedAdamBuilder"):
    get_accelerator().create_op_builder(name).load()
"""
SIDES = {"stock": (), "patched": (sys.executable, "-m", "ds_patches", "run", "--")}
#: Tests that fail on a patched DeepSpeed and are to: a part of their names, and why.
BY_DESIGN: dict[str, str] = {}


def upstream(checkout: Path, version: str, sample: int, salt: str, only: Sequence[str]) -> int:
    """Run the unit tests of a checkout on a release; 1 if one differs that is not to.

    sample: how many of those that are collected; 0 for all. only: files or folders of the tests.
    """
    if not install_one(version):
        return 1
    python(version, "-c", BUILT)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(SIDES)) as pool:
        # Away from the checkout: its conftest puts what lies beside its tests before the release.
        tests = Path(shutil.copytree(checkout / "tests", Path(scratch, "tests")))
        paths = [path for path in only or FOLDERS if (tests / path).exists()]
        variables = {"JUDGED_SAMPLE": str(sample), "JUDGED_SALT": salt}

        def run(side: str) -> dict[str, tuple[str, str]]:
            return _run(tests, paths, side, environment(version) | variables)

        stock, patched = pool.map(run, SIDES)
    passed = sum(outcome == "passed" for outcome, _ in stock.values())
    say(f"DeepSpeed {version}: {len(stock)} tests, {passed} pass on stock")
    unlike = [
        one for one in sorted({*stock, *patched}) if _outcome(stock, one) != _outcome(patched, one)
    ]
    strange = 0
    for name in unlike:
        why = next((why for part, why in BY_DESIGN.items() if part in name), "")
        strange += not why
        say(
            f"{name}\n  stock: {stock.get(name)}\n  patched: {patched.get(name)}\n  {why or 'WHY?'}"
        )
    say(f"{len(unlike)} differ, {len(unlike) - strange} of them by design")
    return int(bool(strange) or not passed)


def _outcome(found: dict[str, tuple[str, str]], name: str) -> str:
    return found.get(name, ("not run", ""))[0]


def _run(
    tests: Path, paths: Sequence[str], side: str, variables: dict[str, str]
) -> dict[str, tuple[str, str]]:
    """What becomes of each test. One that hangs ends pytest, which then goes on behind it."""
    log = tests.with_name(side)
    own = variables | {"JUDGED_LOG": str(log), "DS_UNITTEST_TIMEOUT": HUNG}
    own["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    words = ("-m", "pytest", "-q", "-p", "tests.releases.judged", "-p", "no:cacheprovider")
    began = -1
    while began < (began := len(_noted(log))):
        with log.with_suffix(".out").open("ab") as out:
            subprocess.run(
                [*SIDES[side], sys.executable, *words, "--continue-on-collection-errors", *paths],
                cwd=tests, env=own, stdout=out, stderr=out,
            )  # fmt: skip
    if not began:
        say(log.with_suffix(".out").read_text("utf-8", errors="replace")[-3000:])
    return _noted(log)


def _noted(log: Path) -> dict[str, tuple[str, str]]:
    """The outcome and message of each test that began: the last that was noted."""
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    return {name: (outcome, message) for name, outcome, message in map(json.loads, lines)}
