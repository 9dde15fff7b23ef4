"""Put releases beside each other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable

from tests import releases
from tests.releases import each, say


def install(wanted: Iterable[str]) -> int:
    """Install what is missing of `wanted`; 1 when one could not be installed.

    wanted: versions of DeepSpeed, and name==version of other packages.
    """
    done = each(install_one, tuple(dict.fromkeys(wanted)))
    failed = [one for one, trouble in done if trouble]
    if failed:
        print(f"not installed: {' '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def install_one(wanted: str) -> str:
    """Install this one if it is missing, and say so; pip's output when it failed, else nothing."""
    requirement = wanted if "==" in wanted else f"deepspeed=={wanted}"
    whole = releases.place(wanted)
    if whole.is_dir():
        say(f"{requirement}: already there")
        return ""
    # Renamed only when pip is done: a folder of that name is a whole install.
    whole.parent.mkdir(parents=True, exist_ok=True)
    part = whole.with_name(f".part-{whole.name}")
    shutil.rmtree(part, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    start = time.monotonic()
    done = subprocess.run(
        [*command, "--target", str(part), requirement],
        env=os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        say(f"{requirement}: failed\n{done.stdout}")
        return done.stdout
    part.rename(whole)
    say(f"{requirement}: installed in {time.monotonic() - start:.1f} s")
    return ""
