"""One launch: a line of docs/launchers.md, its output, what its ranks reported, and its end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
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
import torch

from tests import shell
from tests.launchers.user import model

#: A launch takes 5 to 15 s on two idle cores.
SECONDS = 150.0
TAIL_LINES = 120
REPORTS = "reports"
_PAGE = shell.REPOSITORY / "docs" / "launchers.md"
RANKS = 2
CRASH = "The size of tensor a (0) must match the size of tensor b"
#: Of rank 0, with a launcher's prefix or without.
_LIVE = re.compile(rf"ds_patches: .*zero3_retain.* live on all {RANKS} ranks of this engine$", re.M)


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
        # What is killed may just be starting others.
        while left := working_in(self._folder):
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.poll()
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


def assert_patched(*runs: Run) -> None:
    """Every rank came to its end with the patch live and PyTorch's gradients; rank 0 says so.

    runs: of one job, one for each host that it was launched on.
    """
    text = "\n".join(map(str, runs))
    assert not any(run.code for run in runs), text
    assert len(_LIVE.findall("\n".join(run.output for run in runs))) == 1, text
    reports = runs[0].reports
    assert [(report["rank"], report["world"]) for report in reports] == [(0, 2), (1, 2)], text
    expected = gradients()
    for report in reports:
        assert "zero3_retain" in report["live"], text
        assert report["gradients"].keys() == expected.keys()
        for name, found in report["gradients"].items():
            torch.testing.assert_close(torch.tensor(found), expected[name], msg=f"{name}\n{text}")


def assert_stock(run: Run) -> None:
    """Stock crashed, and nobody said a word of ds_patches: a single patched rank would have."""
    assert run.code, run
    assert CRASH in run.output, run
    assert "ds_patches: " not in run.output, run
    assert not run.reports, run


def gradients() -> dict[str, torch.Tensor]:
    """Of the same losses in plain PyTorch, averaged over the ranks' batches."""
    network = model.build()
    for rank in range(RANKS):
        tokens = model.batch(rank)
        (sum(model.losses(network(tokens), tokens)) / RANKS).backward()
    return {name: param.grad for name, param in network.named_parameters()}


# What is tested is what is written on the page.


def line_with(words: str) -> str:
    """The one line in the page's shell blocks with these words in it."""
    found = [line for block in _blocks("bash") for line in block.splitlines() if words in line]
    assert len(found) == 1, f"{words!r} is in {len(found)} lines of {_PAGE}"
    return found[0].partition("  # ")[0]


def block(language: str, words: str) -> str:
    """The one code block in `language` with these words in it."""
    found = [block for block in _blocks(language) if words in block]
    assert len(found) == 1, f"{words!r} is in {len(found)} blocks of {_PAGE}"
    return found[0]


def _blocks(language: str) -> list[str]:
    text = _PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
