"""Run a subset of the suite once per DeepSpeed release, and say how each went."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
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
        command = [sys.executable, "-m", "pytest", "-q", "-m", select, f"--junitxml={report}"]
        done = subprocess.run(command, cwd=releases.ROOT, env=environment(version))
        if not report.exists():
            return Outcome(version, trouble=f"pytest stopped with code {done.returncode}")
        return read(version, report, done.returncode)


def environment(version: str) -> dict[str, str]:
    path = [str(releases.folder() / version), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        # The suite refuses to run on another one, whatever else sits on the path.
        "DEEPSPEED_TEST_RELEASE": version,
        # What one release compiled must not be loaded by the next.
        "TORCH_EXTENSIONS_DIR": str(releases.ROOT / ".releases" / ".torch_extensions" / version),
    }


def read(version: str, report: Path, code: int) -> Outcome:
    """The outcome in pytest's junit file."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    trouble = ""
    if code:
        trouble = first_failure(suite) or f"pytest stopped with code {code}"
    if total == skipped:
        trouble = trouble if failed else "no test ran"
    return Outcome(
        version, total - failed - skipped, failed, skipped, float(suite.attrib["time"]), trouble
    )


def first_failure(suite: ElementTree.Element) -> str:
    for case in suite.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            return f"{case.attrib['classname']}::{case.attrib['name']}"
    return ""


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [("DeepSpeed", "passed", "failed", "skipped", "seconds", "first failure")]
    for o in outcomes:
        numbers = (str(o.passed), str(o.failed), str(o.skipped), f"{o.seconds:.1f}")
        rows.append((o.version, *numbers, o.trouble or "-"))
    return "\n".join(
        f"{version:<9}  {passed:>6}  {failed:>6}  {skipped:>7}  {seconds:>7}  {trouble}"
        for version, passed, failed, skipped, seconds, trouble in rows
    )
