"""One launch: a line of a shell, its output, what its ranks reported, and its end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests import shell

#: A launch takes 5 to 15 s on two idle cores.
SECONDS = 150.0
TAIL_LINES = 120
REPORTS = "reports"


def location(package: str) -> Path:
    """The folder on the path that `package` is imported from."""
    spec = importlib.util.find_spec(package)
    assert spec, package
    assert spec.origin, package
    return Path(spec.origin).parents[1]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """A user's, with the commands of this Python and DeepSpeed."""
    commands = [location("deepspeed") / "bin", Path(sys.executable).parent, os.environ["PATH"]]
    own = {
        "PATH": os.pathsep.join(map(str, commands)),
        "HOME": str(folder.parent),  # without the settings of whoever runs the tests
        "DS_ACCELERATOR": "cpu",
    }
    return shell.environment(**(own | more))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@dataclass(frozen=True)
class Run:
    """A launch that has ended; as text, what an assertion shows of it.

    reports: of the ranks that came to their end, in rank order.
    """

    line: str
    code: int
    output: str
    reports: list[dict[str, Any]]

    def __str__(self) -> str:
        tail = "\n".join(self.output.splitlines()[-TAIL_LINES:])
        ended = [report["rank"] for report in self.reports]
        return f"$ {self.line}\n{tail}\nexit code {self.code}, reports of ranks {ended}"


class Launch:
    """A line of a shell, run in `folder`; leaving the block ends all that works there."""

    def __init__(self, line: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.line = f"{line} {REPORTS}"
        self._folder = folder
        self._deadline = time.monotonic() + SECONDS
        self._output = folder / f"output-{time.monotonic_ns()}"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                ["bash", "-c", self.line],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        # What is killed may just be starting others.
        while left := working_in(self._folder):
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.01)

    def result(self) -> Run:
        """Wait for the end; fails after SECONDS."""
        try:
            self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = self._run(-signal.SIGKILL)
            raise AssertionError(f"still running after {SECONDS:g} s: {late}") from None
        return self._run(self._process.returncode)

    def _run(self, code: int) -> Run:
        files = (self._folder / REPORTS).glob("*.json")
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        return Run(
            self.line,
            code,
            self._output.read_text(encoding="utf-8", errors="replace"),
            sorted(reports, key=lambda report: report["rank"]),
        )


def working_in(folder: Path) -> list[psutil.Process]:
    """Those at work in `folder`, or below it: torchrun's workers have sessions of their own."""

    def here(process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return Path(process.cwd()).is_relative_to(folder)
        return False

    return [*filter(here, psutil.process_iter())]


def run(line: str, folder: Path, environment: Mapping[str, str]) -> Run:
    """Launch a line, and wait for its end."""
    with Launch(line, folder, environment) as launch:
        return launch.result()
