"""Run the core subset of the suite, or all of the patches' tests, once per DeepSpeed release."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version as version_of
from pathlib import Path

from ds_patches.core import registry
from tests import releases
from tests.releases.at_once import DEFAULT, each, say
from tests.releases.columns import marked_files, tests_of
from tests.releases.install import install_one


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
    at_once: int = DEFAULT,
    within: float | None = None,
    one: Callable[[str, Sequence[str]], Outcome] | None = None,
) -> int:
    """The core cases on each of `versions`, installed where missing; 1 when one was not good.

    whole: every test of every patch instead.
    within: seconds; what was not begun by then is named as left out, which is no error.
    one: does it for a release; `run_one` if not given.
    """
    ended = dict(
        each(lambda version: (one or run_one)(version, chosen(whole)), versions, at_once, within)
    )
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
    """pytest with these arguments on one release, with its output in one piece."""
    if install_one(version):
        return Outcome(version, trouble="could not be installed")
    say(f"DeepSpeed {version}: begun")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        code, output = pytest(version, report, *arguments)
        if report.exists():
            outcome = read(version, report, code)
        else:
            outcome = Outcome(version, trouble=f"pytest stopped with code {code}")
    say(f"\n=== DeepSpeed {version}, {time.monotonic() - start:.0f} s\n{output}")
    return outcome


def pytest(version: str, report: Path, *arguments: str) -> tuple[int, str]:
    """Run pytest on one release, with its junit file at `report`; its exit code and its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command.append("--disable-warnings")
    done = subprocess.run(
        [*command, f"--junitxml={report}", *arguments],
        cwd=releases.ROOT,
        env=environment(version),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.returncode, done.stdout


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


def read(version: str, report: Path, code: int) -> Outcome:
    """The outcome in pytest's junit file."""
    outcome = count(version, cases_in(report))
    if code and not outcome.trouble:
        return replace(outcome, trouble=f"pytest stopped with code {code}")
    return outcome


def cases_in(report: Path) -> list[ElementTree.Element]:
    return list(ElementTree.parse(report).iter("testcase"))


def count(version: str, cases: Sequence[ElementTree.Element]) -> Outcome:
    """The outcome of these test cases of a junit file; its trouble is the first failure."""
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None and c not in bad]
    passed = len(cases) - len(bad) - len(skipped)
    trouble = "" if passed else "no test ran"
    if bad:
        trouble = f"{bad[0].attrib['classname']}::{bad[0].attrib['name']}"
    seconds = sum(float(case.attrib["time"]) for case in cases)
    return Outcome(version, passed, len(bad), len(skipped), seconds, trouble)


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [("DeepSpeed", "passed", "failed", "skipped", "seconds", "first failure")]
    for o in outcomes:
        numbers = (str(o.passed), str(o.failed), str(o.skipped), f"{o.seconds:.1f}")
        rows.append((o.version, *numbers, o.trouble or "-"))
    return "\n".join(
        f"{version:<9}  {passed:>6}  {failed:>6}  {skipped:>7}  {seconds:>7}  {trouble}"
        for version, passed, failed, skipped, seconds, trouble in rows
    )
