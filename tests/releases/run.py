"""Run the core subset of the suite, or all of the patches' tests, once per DeepSpeed release."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path

from ds_patches.core import registry
from tests import releases
from tests.releases import each, markdown, say
from tests.releases.columns import marked_files, tests_of
from tests.releases.install import install_one

Case = ElementTree.Element

#: pytest's exit codes after which its report is whole: all passed, some failed, none there.
WHOLE = (0, 1, 5)


@dataclass(frozen=True)
class Outcome:
    """One release's run; `trouble` is empty when it was good."""

    version: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    trouble: str = ""


def run(
    versions: Sequence[str],
    whole: bool = False,
    within: float | None = None,
) -> int:
    """The core cases on each of `versions`, installed where missing; 1 when one was not good.

    whole: every test of every patch instead.
    within: seconds; what was not begun by then is named as left out, which is no error.
    """
    ended = dict(each(lambda version: run_one(version, chosen(whole)), versions, within))
    outcomes = [outcome for version in versions if (outcome := ended[version])]
    say(f"\n{table(outcomes)}")
    if late := [version for version in versions if not ended[version]]:
        say(f"\nleft out, as not begun within {within:g} s: {' '.join(late)}")
    return int(not outcomes or any(outcome.trouble for outcome in outcomes))


def chosen(whole: bool) -> list[str]:
    """What pytest is told to run: files, so that it does not collect all the others."""
    if whole:
        return [path for name in registry.patches() for path in tests_of(name)]
    return ["-m", "core_case", *marked_files()]


def run_one(version: str, arguments: Sequence[str]) -> Outcome:
    """pytest with these arguments on one release."""
    if install_one(version):
        return Outcome(version, trouble="could not be installed")
    say(f"DeepSpeed {version}: begun")
    code, cases = pytest(version, *arguments)
    return count(version, cases, code)


def pytest(version: str, *arguments: str) -> tuple[int, list[Case]]:
    """Run pytest on one release, its output in one piece; its exit code, and its junit cases."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--disable-warnings")
        done = python(version, *command, f"--junitxml={report}", *arguments)
        found = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    say(f"\n=== DeepSpeed {version}, {time.monotonic() - start:.0f} s\n{done.stdout}")
    return done.returncode, found


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
    path = [str(releases.folder() / version), os.environ.get("PYTHONPATH", "")]
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


def count(version: str, cases: Sequence[Case], code: int = 0) -> Outcome:
    """The outcome of these test cases of a junit file; its trouble is the first failure.

    code: pytest's, after which something else may be wrong.
    """
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None and c not in bad]
    passed = len(cases) - len(bad) - len(skipped)
    trouble = "" if passed else "no test ran"
    if bad:
        trouble = f"{bad[0].attrib['classname']}::{bad[0].attrib['name']}"
    elif code not in WHOLE:
        trouble = f"pytest stopped with code {code}"
    seconds = sum(float(case.attrib["time"]) for case in cases)
    return Outcome(version, passed, len(bad), len(skipped), seconds, trouble)


def table(outcomes: Sequence[Outcome]) -> str:
    rows = (
        (o.version, str(o.passed), str(o.failed), str(o.skipped), f"{o.seconds:.1f}", o.trouble)
        for o in outcomes
    )
    return markdown(("DeepSpeed", "passed", "failed", "skipped", "seconds", "trouble"), rows)
