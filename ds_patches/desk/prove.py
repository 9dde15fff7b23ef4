"""`prove`: a row of what is wrong here, trained by plain PyTorch, stock and patched DeepSpeed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from ds_patches.core import columns, flags, release
from ds_patches.core.errors import DsPatchesError, FlagError, nearest
from ds_patches.desk import picture, proofs
from ds_patches.desk.proofs import ranks
from ds_patches.desk.row import Symptom, plain
from ds_patches.desk.symptoms import CURED

SIDES = ("PyTorch", "stock", "patched")
#: Exit statuses: patched is right; it is not.
RIGHT, WRONG = 0, 1
#: Of what PyTorch learns: half precision is off by 3e-4, and the smallest defect by 1e-2.
ROUNDING = 1e-3
_BARS = "▁▂▃▄▅▆▇█"
_PATIENCE = 300  # seconds


@dataclass(frozen=True)
class Run:
    """One side's losses by step, or the first line of its error."""

    losses: tuple[float, ...] = ()
    error: str = ""

    def off(self, other: Run) -> float:
        """How far it is from the other at most, in parts of what the other learns."""
        gap = max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))
        return gap / (max(other.losses) - min(other.losses))

    def told(self, other: Run) -> str:
        return self.error or f"off by {self.off(other):.2g} of what PyTorch learns"

    def is_right(self, other: Run) -> bool:
        return not self.error and self.off(other) <= ROUNDING  # and no NaN


def listed() -> int:
    """Print the rows that this release has and a CPU can show."""
    here = _here()
    found = {one.proof: one for one in reversed(CURED) if one.proof and one.is_wrong(here)}
    print(f"what DeepSpeed {here} gets wrong, and `ds-patches prove NAME` shows:")
    rows = [(name, _told(one)) for name, one in reversed(found.items())]
    print(*(f"  {line}" for line in columns.aligned(rows)), sep="\n")
    return RIGHT


def prove(name: str, svg: Path | None = None, *, script: bool) -> int:
    """Train the script of a row on all sides, and print what they come to; or print it.

    svg: the file of a picture of it.
    """
    rows = [one for one in CURED if name and one.proof == name]
    if not rows:
        known = [one.proof for one in CURED if one.proof]
        raise FlagError(f"no proof is named {name!r}{nearest(name, known)}: `ds-patches prove`")
    here = _here()
    row = next((one for one in rows if one.is_wrong(here)), rows[-1])
    title = f"DeepSpeed {here}, {_told(row)}"
    text = proofs.compose(name, _stage(row), title)
    if script:
        print(text, end="")
        return RIGHT
    if svg:
        picture.must_draw(svg)
    print(f"{title}\n", flush=True)
    return compare(text, title, svg)


def compare(text: str, title: str = "", svg: Path | None = None) -> int:
    """Run a reproducer on all sides, and print what they come to; returns the exit status."""
    runs = _train(text)
    expected, stock, patched = (runs[side] for side in SIDES)
    if expected.error:
        raise DsPatchesError(f"plain PyTorch does not train: {expected.error}")
    print("\n".join([*_table(runs), "", *_sparks(runs)]))
    print(f"\nstock:   {stock.told(expected)}\npatched: {patched.told(expected)}")
    verdicts = [f"{n} is {'right' if runs[n].is_right(expected) else 'wrong'}" for n in SIDES[1:]]
    print(f"verdict: {', '.join(verdicts)}")
    if svg:
        picture.draw(title, {side: one.losses for side, one in runs.items()}, svg)
    return RIGHT if patched.is_right(expected) else WRONG


def _here() -> Version:
    found = release.installed()
    if not found or not found.version:
        raise DsPatchesError("prove needs an installed DeepSpeed")
    return found.version


def _stage(one: Symptom) -> int:
    stage = proofs.PROOFS[one.proof].stage
    return one.stages[-1] if stage is None else stage


def _told(one: Symptom) -> str:
    return f"ZeRO {_stage(one)}: {plain(one.script)}: {plain(one.outcome)}"


def _train(text: str) -> dict[str, Run]:
    """Train on all sides at once, each in processes of its own."""
    theirs = {k: v for k, v in os.environ.items() if not k.startswith(flags.PREFIX)}
    theirs |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "proof.py")
        script.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", ranks.__name__, str(script), *SIDES]
        with Path(folder, "log").open("wb") as log, subprocess.Popen(
            command, env=theirs, stdin=subprocess.PIPE, stdout=log, stderr=log,
            start_new_session=True,
        ) as started:  # fmt: skip
            try:
                with suppress(subprocess.TimeoutExpired):
                    started.wait(_PATIENCE)
            finally:  # also of an interruption
                with suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
        return {side: _outcome(script, side) for side in SIDES}


def _outcome(script: Path, side: str) -> Run:
    files = [ranks.log(script, side, rank) for rank in range(ranks.RANKS)]
    logs = [file.read_text("utf-8", errors="replace") for file in files if file.exists()]
    if found := re.search(r"^(?:PyTorch|DeepSpeed)((?: [-+.\w]+)+)$", "\n".join(logs), re.M):
        return Run(tuple(map(float, found[1].split())))
    # A rank that fails for another's sake says that its connection is closed.
    for text in sorted(logs, key=lambda text: "Connection closed by peer" in text):
        last = text.rpartition("Traceback (most recent call last):\n")[2]
        if error := last != text and re.search(r"^\w.*$", last, re.M):
            return Run(error=error[0])
    return Run(error="no answer: it hangs")


def _table(runs: Mapping[str, Run]) -> list[str]:
    trained = {side: one.losses for side, one in runs.items() if one.losses}
    steps = enumerate(zip(*trained.values(), strict=True), 1)
    rows = [(str(at), *(f"{loss:.4f}" for loss in losses)) for at, losses in steps]
    return columns.aligned([("step", *trained), *rows])


def _sparks(runs: Mapping[str, Run]) -> list[str]:
    """A line for each side: how high each loss is, from 0 to PyTorch's highest."""
    top = max(runs["PyTorch"].losses)

    def bar(loss: float) -> str:
        height = min(1.0, loss / top) if loss == loss else 1.0  # NaN is as bad as it gets
        return _BARS[round(height * (len(_BARS) - 1))]

    lines = [(side, "".join(map(bar, one.losses))) for side, one in runs.items() if one.losses]
    return columns.aligned(lines)
