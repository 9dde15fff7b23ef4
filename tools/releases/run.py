"""Run the core subset of the suite, or all of the patches' tests, once per DeepSpeed release."""

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from importlib.metadata import version as version_of
from math import inf
from pathlib import Path

import ds_patches
from tools import releases
from tools.releases import each, install_one, say

#: Where the core cases are that are of no patch.
CORE_TESTS = ("tests/core", "tests/diagnostics/traincheck", "tests/models")


def tests_of(patch: str) -> str:
    folder = f"tests/cures/{patch}"
    return folder if (releases.ROOT / folder).is_dir() else f"tests/{patch}"


def run(versions: Sequence[str], whole: bool = False, within: float = inf) -> int:
    """The core cases on each of `versions`, installed where missing; 1 when one was not good.

    whole: every test of every patch instead.
    within: seconds; what was not begun by then is named as left out, which is no error.
    """
    folders = [tests_of(name) for name in ds_patches.names()]
    chosen = folders if whole else ["-m", "core_case", *folders, *CORE_TESTS]
    ended = dict(each(lambda version: pytest(version, *chosen)[0], versions, within))
    for version in versions:
        say(
            f"{version}: {'left out' if ended[version] is None else f'ended with {ended[version]}'}"
        )
    codes = {*ended.values()} - {None}
    return int(codes != {0})


def pytest(version: str, *arguments: str) -> tuple[int, list[ElementTree.Element]]:
    """Run pytest on one release, its output in one piece; its exit code, and its junit cases."""
    if not install_one(version):
        return 1, []
    say(f"DeepSpeed {version}: begun")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--disable-warnings")
        done = python(version, *command, f"--junitxml={report}", *arguments)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    say(f"\n=== DeepSpeed {version}, {time.monotonic() - start:.0f} s\n{done.stdout}")
    return done.returncode, cases


def python(version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with that release, what it prints in one piece."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=releases.ROOT,
        env=environment(version),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def environment(version: str) -> dict[str, str]:
    """The environment of a process that has this release, and no wish of the caller's own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("DS_PATCHES")}
    path = [str(releases.place(version)), os.environ.get("PYTHONPATH", "")]
    return inherited | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "DS_ACCELERATOR": "cpu",
        # The suite refuses to run on another one, whatever else sits on the path.
        "DEEPSPEED_TEST_RELEASE": version,
        # What one release compiled must not be loaded by the next, nor by another torch.
        "TORCH_EXTENSIONS_DIR": str(
            releases.ROOT / ".releases" / ".torch_extensions" / version / version_of("torch")
        ),
    }
