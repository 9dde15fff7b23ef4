"""`doctor --train-check`: does a small model train here, stock and with what would be applied?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_patches.core import flags

_TRIAL = ("ds_patches.traincheck.trial",)
#: In the place of a launcher's: the trial is one process.
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


class Diagnosis:
    """The lines to print, as they come, and whether all trains with what would be applied."""

    def __init__(self, environment: Mapping[str, str], seconds: float) -> None:
        self._environment = {**environment, **_ALONE}
        self._seconds = seconds
        self.trains = True

    def lines(self) -> Iterator[str]:
        stock = self._trial()
        yield f"train check: 4 parameters, ZeRO-3, one process on {stock.get('device', '?')}"
        yield f"  eager, stock: {_said(stock)}"
        yield self._patched("eager")
        why_not = stock.get("deepcompile", "the first trial said nothing of it")
        if not why_not:
            compiled = self._trial("--compiled")
            why_not = compiled.get("deepcompile")
        if why_not:
            yield f"  DeepCompile: not checked, {why_not}; the lines above are of eager ZeRO-3"
            return
        yield f"  DeepCompile, stock: {_said(compiled)}"
        yield self._patched("DeepCompile", "--compiled")

    def _patched(self, name: str, *options: str) -> str:
        found = self._trial("--patched", *options)
        self.trains &= not found["error"] and not found["untrained"]
        return f"  {name}, {', '.join(found['live']) or 'no patch'} live: {_said(found)}"

    def _trial(self, *options: str) -> dict[str, Any]:
        """Run one and return what it wrote, or why it wrote nothing."""
        environment = self._environment
        if "--patched" not in options:
            environment = {k: v for k, v in environment.items() if not flags.is_ours(k)}
        with tempfile.TemporaryDirectory() as folder:
            result, output = Path(folder, "result"), Path(folder, "output")
            with output.open("wb") as sink:
                trial = subprocess.Popen(
                    [sys.executable, "-m", *_TRIAL, str(result), *options],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that its compilers end with it
                )
                try:
                    trial.wait(self._seconds)
                except subprocess.TimeoutExpired:
                    return _failed(f"not done after {self._seconds:g} s (--timeout)")
                finally:
                    if trial.poll() is None:
                        os.killpg(trial.pid, signal.SIGKILL)
                        trial.wait()
            if result.exists():
                return {**_failed(""), **json.loads(result.read_text(encoding="utf-8"))}
            last = output.read_text(errors="replace").strip().rpartition("\n")[2]
            return _failed(f"exit code {trial.returncode}, {last or 'without a word'}")


def _failed(error: str) -> dict[str, Any]:
    return {"live": [], "untrained": [], "error": error}


def _said(found: dict[str, Any]) -> str:
    if found["error"]:
        return f"did not run: {found['error']}"
    if found["untrained"]:
        return f"NOT TRAINED: {', '.join(found['untrained'])}"
    return "all train"
