"""Put releases beside each other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests import releases


def install(wanted: Sequence[str]) -> int:
    """Install what is missing of `wanted`; 1 when one could not be installed.

    wanted: versions of DeepSpeed, and name==version of other packages.
    """
    releases.folder().mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(wanted, start=1):
        requirement = one if "==" in one else f"deepspeed=={one}"
        print(f"[{number}/{len(wanted)}] {requirement}: ", end="", flush=True)
        whole = releases.place(one)
        if whole.is_dir():
            print("already there")
            continue
        start = time.monotonic()
        trouble = install_one(requirement, whole)
        if trouble:
            print(f"failed\n{trouble}")
            return 1
        print(f"installed in {time.monotonic() - start:.1f} s", flush=True)
    return 0


def install_one(requirement: str, whole: Path) -> str:
    """pip's output when it failed, else nothing."""
    # Renamed only when pip is done: a folder of that name is a whole install.
    part = whole.with_name(f".part-{whole.name}")
    shutil.rmtree(part, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--target", str(part), requirement],
        env=os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode == 0:
        part.rename(whole)
        return ""
    return done.stdout
