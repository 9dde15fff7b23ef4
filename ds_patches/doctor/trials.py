"""A module of ours in a process of its own: what hangs or crashes there is a report here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def run(words: Sequence[str], environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Run `python -m WORDS RESULT` and return what it left in RESULT.

    "error" says why it did not come to its end, or nothing if it did.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder, "result"), Path(folder, "output")
        with output.open("wb") as sink:
            trial = subprocess.Popen(
                [sys.executable, "-m", *words, str(result)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its compilers end with it
            )
            late = False
            try:
                trial.wait(seconds)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                if trial.poll() is None:
                    os.killpg(trial.pid, signal.SIGKILL)
                    trial.wait()
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        if late:
            return {**found, "error": f"not done after {seconds:g} s (--timeout)"}
        if "error" in found:
            return dict(found)
        last = output.read_text(errors="replace").strip().rpartition("\n")[2]
        return {**found, "error": f"exit code {trial.returncode}, {last or 'without a word'}"}


@contextmanager
def leaving(result: Path) -> Iterator[dict[str, Any]]:
    """In the trial: leave what the block puts into the dict. An error of the block is left too."""
    found: dict[str, Any] = {}
    try:
        yield found
        found.setdefault("error", "")
    except Exception as error:
        found["error"] = first_line(error)
        raise
    finally:
        part = result.with_suffix(".part")  # whole or not at all: the trial may be killed
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(result)


def first_line(error: Exception) -> str:
    """Return an error in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
