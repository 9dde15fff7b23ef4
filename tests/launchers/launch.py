"""One launch: a line of docs/launchers.md, its output, what its ranks reported, and its end."""

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
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests import shell
from tests.core import fake

#: A launch takes 5 to 15 s on two idle cores.
SECONDS = 150.0
REPORTS = "reports"
CRASH = "The size of tensor a (0) must match the size of tensor b"
_PAGE = (shell.REPOSITORY / "docs/launchers.md").read_text(encoding="utf-8")
#: Of rank 0, with a launcher's prefix or without.
_LIVE = re.compile(r"ds_patches: .*zero3_retain.* live on all 2 ranks of this engine$", re.M)


def location(package: str) -> Path:
    """The folder on the path that `package` is imported from."""
    spec = importlib.util.find_spec(package)
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


def environment_of(installed: Path, folder: Path, **more: str) -> dict[str, str]:
    """The same, with the commands of an environment of its own, and nothing on PYTHONPATH."""
    path = f"{installed / 'bin'}{os.pathsep}{environment(folder)['PATH']}"
    return environment(folder, PATH=path, PYTHONPATH="", **more)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Run(NamedTuple):
    """A launch that has ended.

    reports: of the ranks that came to their end, in rank order. tail: of it, for an assertion.
    """

    code: int
    output: str
    reports: list[dict[str, Any]]
    tail: str


@contextmanager
def launched(line: str, folder: Path, environment: Mapping[str, str]) -> Iterator[Any]:
    """Launch a line in `folder`: what waits for its end; leaving the block ends all there."""
    output = folder / f"output-{time.monotonic_ns()}"
    deadline = time.monotonic() + SECONDS
    with output.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"{line} {REPORTS}"],
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
        code, text = process.poll(), output.read_text(encoding="utf-8", errors="replace")
        files = sorted((folder / REPORTS).glob("*.json"))  # by rank
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        tail = "\n".join([f"$ {line}", *text.splitlines()[-120:], f"exit code {code}"])
        assert code is not None, f"still running after {SECONDS:g} s: {tail}"
        return Run(code, text, reports, tail)

    try:
        yield result
    finally:
        # What is killed may just be starting others.
        while left := [*filter(lambda other: _is_in(folder, other), psutil.process_iter())]:
            for other in left:
                with suppress(psutil.NoSuchProcess):
                    other.kill()
            process.poll()
            time.sleep(0.01)


def _is_in(folder: Path, process: psutil.Process) -> bool:
    """Return True if a process works in or below `folder`: workers have sessions of their own."""
    with suppress(psutil.Error):
        return Path(process.cwd()).is_relative_to(folder)
    return False


def run(line: str, folder: Path, environment: Mapping[str, str]) -> Run:
    with launched(line, folder, environment) as result:
        return result()


def assert_patched(*runs: Run) -> None:
    """Every rank came to its end with the patch live; rank 0 says so.

    runs: of one job, one for each host that it was launched on.
    """
    text = "\n".join(run.tail for run in runs)
    assert not any(run.code for run in runs), text
    assert len(_LIVE.findall("\n".join(run.output for run in runs))) == 1, text
    reports = runs[0].reports
    assert [(report["rank"], report["world"]) for report in reports] == [(0, 2), (1, 2)], text
    assert all("zero3_retain" in report["live"] for report in reports), text


def assert_stock(run: Run) -> None:
    """Stock crashed, and nobody said a word of ds_patches: a single patched rank would have."""
    assert run.code, run.tail
    assert CRASH in run.output, run.tail
    assert "ds_patches: " not in run.output, run.tail
    assert not run.reports, run.tail


# What is tested is what is written on the page.


def line_with(words: str, *edits: tuple[str, str]) -> str:
    """The one line in the page's shell blocks with these words in it, edited."""
    (line,) = [row for text in _blocks("bash") for row in text.splitlines() if words in row]
    line = line.partition("  # ")[0]
    for old, new in edits:
        line = fake.edited(line, old, new)
    return line


def block(language: str, words: str) -> str:
    """The one code block in `language` with these words in it."""
    (block_text,) = [text for text in _blocks(language) if words in text]
    return block_text


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", _PAGE, re.M | re.S)
