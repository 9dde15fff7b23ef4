"""One launch: a line of docs/launchers.md, its output, what its ranks reported, and its end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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


@contextmanager
def launched(line: str, folder: Path, environment: Mapping[str, str]) -> Iterator[Any]:
    """Launch a line in `folder`: what waits for its end; leaving the block ends all there."""
    line, output = f"{line} {REPORTS}", folder / f"output-{time.monotonic_ns()}"
    deadline = time.monotonic() + SECONDS
    with output.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-c", line],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def result() -> Run:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        code = process.poll()
        files = (folder / REPORTS).glob("*.json")
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        text = output.read_text(encoding="utf-8", errors="replace")
        run = Run(line, code or 0, text, sorted(reports, key=lambda report: report["rank"]))
        assert code is not None, f"still running after {SECONDS:g} s: {run}"
        return run

    try:
        yield result
    finally:
        # What is killed may just be starting others.
        while left := working_in(folder):
            for other in left:
                with suppress(psutil.NoSuchProcess):
                    other.kill()
            process.poll()
            time.sleep(0.01)


def working_in(folder: Path) -> list[psutil.Process]:
    """Those at work in `folder`, or below it: torchrun's workers have sessions of their own."""

    def here(process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return Path(process.cwd()).is_relative_to(folder)
        return False

    return [*filter(here, psutil.process_iter())]


def run(line: str, folder: Path, environment: Mapping[str, str]) -> Run:
    """Launch a line, and wait for its end."""
    with launched(line, folder, environment) as result:
        return result()


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
