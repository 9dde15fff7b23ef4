"""Run a subset of the suite once per DeepSpeed release, and say how each went."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests import releases


@dataclass(frozen=True)
class Outcome:
    """One release's run; `trouble` is empty when it was good."""

    version: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    trouble: str = ""


def run(versions: Sequence[str], select: str) -> int:
    """pytest -m `select` on each of `versions`; 1 when one of them was not good."""
    missing = [v for v in versions if not (releases.folder() / v / "deepspeed").is_dir()]
    if missing:
        print(f"not installed in {releases.folder()}: {' '.join(missing)}", file=sys.stderr)
        return 1
    outcomes = [run_one(version, select) for version in versions]
    print("\n" + table(outcomes), flush=True)
    return int(any(outcome.trouble for outcome in outcomes))


def run_one(version: str, select: str) -> Outcome:
    print(f"\n=== DeepSpeed {version}: pytest -m '{select}'", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        code = pytest(version, report, "-m", select)
        if not report.exists():
            return Outcome(version, trouble=f"pytest stopped with code {code}")
        return read(version, report, code)


def pytest(version: str, report: Path, *arguments: str) -> int:
    """Run pytest on one release, with its junit file at `report`; its exit code."""
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
    return subprocess.run(command, cwd=releases.ROOT, env=environment(version)).returncode


def environment(version: str) -> dict[str, str]:
    """The environment of a process that has this release, and no wish of the caller's own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("DS_PATCHES")}
    path = [str(releases.folder() / version), os.environ.get("PYTHONPATH", "")]
    return inherited | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "DS_ACCELERATOR": "cpu",
        # The suite refuses to run on another one, whatever else sits on the path.
        "DEEPSPEED_TEST_RELEASE": version,
        # What one release compiled must not be loaded by the next.
        "TORCH_EXTENSIONS_DIR": str(releases.ROOT / ".releases" / ".torch_extensions" / version),
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
