"""`prove`: a row of what is wrong here, trained by plain PyTorch, stock and patched DeepSpeed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from ds_patches.core import columns, flags, release
from ds_patches.core.errors import DsPatchesError, FlagError, nearest
from ds_patches.desk import cured, picture, proofs
from ds_patches.desk.defects import DEFECTS, Defect, plain
from ds_patches.desk.proofs import ranks

SIDES = ("PyTorch", "stock", "patched")
#: Exit statuses: patched is right; it is not.
RIGHT, WRONG = 0, 1
DEVICES = ("cpu", "cuda")
#: Of what PyTorch learns: half precision is off by 3e-4, and the smallest defect by 1e-2.
ROUNDING = 1e-3
_BARS = "▁▂▃▄▅▆▇█"
_PATIENCE = 300  # seconds
_running: set[int] = set()  # groups of processes


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

    def brief(self, other: Run) -> str:
        """Return what `told` does in a word or two: for an error its name."""
        name = re.sub(r"^(\w+\.)*(\w+)\b.*", r"\2", self.error, flags=re.S)
        return name if self.error else f"off by {self.off(other):.2g}"

    def is_right(self, other: Run) -> bool:
        return not self.error and self.off(other) <= ROUNDING  # and no NaN


def listed() -> int:
    """Print what this release gets wrong and a proof shows."""
    here = _here()
    print(f"what DeepSpeed {here} gets wrong, and `ds-patches prove NAME` shows:")
    rows = [
        (name, f"{_told(name, row)}{f' ({why})' if (why := _unable(name, '')) else ''}")
        for name, row in shown(here).items()
    ]
    print(*(f"  {line}" for line in columns.aligned(rows)), sep="\n")
    return RIGHT


def shown(version: Version) -> dict[str, Defect]:
    """Return the rows that a release has and a patch cures, by the names of their proofs."""
    found: dict[str, Defect] = {}
    for one in DEFECTS:
        is_cured = version >= Version(cured.floor(one) or one.first)
        if one.proof and one.is_wrong(version) and is_cured:
            found.setdefault(one.proof, one)
    for name, proof in proofs.PROOFS.items():
        if proof.row in found:
            found[name] = found[proof.row]
    return found


def prove(name: str, svg: Path | None = None, *, script: bool, device: str | None = None) -> int:
    """Train the script of a row on all sides, and print what they come to; or print it.

    svg: the file of a picture of it. device: one of DEVICES, else DeepSpeed's own choice.
    """
    if name not in proofs.PROOFS:
        known = [*proofs.PROOFS]
        raise FlagError(f"no proof is named {name!r}{nearest(name, known)}: `ds-patches prove`")
    here, proof = _here(), proofs.PROOFS[name]
    rows = [one for one in DEFECTS if one.proof == (proof.row or name)]
    row = next((one for one in rows if one.is_wrong(here)), rows[-1])
    title = f"DeepSpeed {here}, {_told(name, row)}"
    text = proofs.compose(name, _stage(name, row), title)
    if script:
        print(text, end="")
        return RIGHT
    if svg:
        picture.must_draw(svg)
    device = _device(device or ("cpu" if "cpu" in proof.only else None))
    if why := _unable(name, device):
        raise FlagError(f"{name} {why}")
    print(f"{title}\n", flush=True)
    return compare(text, title, svg, device=device)


def prove_all(device: str | None = None) -> int:
    """Train all that this release gets wrong, and print a line for each; or why it cannot run."""
    here, device = _here(), _device(device)
    rows = shown(here)
    width = max(map(len, rows), default=0)
    print(f"DeepSpeed {here} on {_hardware(device)}", flush=True)
    print(f"{'':<{width}}  {'stock':<22}  patched", flush=True)
    are_shown = True
    # Each has six processes.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 6)) as pool:
        try:
            lines = pool.map(lambda name: _line(name, rows[name], device), rows)
            for name, (is_shown, line) in zip(rows, lines, strict=True):
                print(f"{name:<{width}}  {line}".rstrip(), flush=True)
                are_shown &= is_shown
        except BaseException:  # an interruption: the pool waits for what it has begun
            pool.shutdown(wait=False, cancel_futures=True)
            _end(*_running)
            raise
    return RIGHT if are_shown else WRONG


def _line(name: str, row: Defect, device: str) -> tuple[bool, str]:
    """Train one of all; return whether it is shown, where it can be, and what it comes to."""
    if why := _unable(name, device):
        return True, why
    runs = _train(proofs.compose(name, _stage(name, row), name), device)
    expected, stock, patched = (runs[side] for side in SIDES)
    if expected.error:
        return False, f"plain PyTorch does not train: {expected.error}"
    told = f"{stock.brief(expected):<22}  {patched.brief(expected):<22}"
    if not stock.is_right(expected) and patched.is_right(expected):
        return True, told
    return False, f"{told}  not shown"


def compare(text: str, title: str = "", svg: Path | None = None, *, device: str = "cpu") -> int:
    """Run a reproducer on all sides, and print what they come to; returns the exit status."""
    runs = _train(text, device)
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


def _device(given: str | None) -> str:
    """Return what proofs run on: by default what DeepSpeed chooses, of those that we know."""
    import torch

    device = given or os.environ.get("DS_ACCELERATOR", "cuda")
    has_gpu = torch.cuda.is_available()
    if given == "cuda" and not has_gpu:
        raise FlagError("--device cuda: torch sees no GPU")
    return "cuda" if device == "cuda" and has_gpu else "cpu"


def _unable(name: str, device: str) -> str:
    """Return why a device does not show a proof, if it does not."""
    if not (only := proofs.PROOFS[name].only) or device in only:
        return ""
    return f"needs a {'CPU' if 'cpu' in only else 'GPU'}: {only[1]}"


def _hardware(device: str) -> str:
    import torch

    count = min(torch.cuda.device_count(), ranks.RANKS)
    gpus = f"{count} x {torch.cuda.get_device_name()}" if device == "cuda" else "two CPU ranks"
    return f"{gpus}, torch {torch.__version__}"


def _stage(name: str, one: Defect) -> int:
    stage = proofs.PROOFS[name].stage
    return one.stages[-1] if stage is None else stage


def _told(name: str, one: Defect) -> str:
    return f"ZeRO {_stage(name, one)}: {plain(one.script)}: {plain(one.outcome)}"


def _train(text: str, device: str) -> dict[str, Run]:
    """Train on all sides at once, each in processes of its own."""
    theirs = {k: v for k, v in os.environ.items() if not k.startswith(flags.PREFIX)}
    theirs |= {"DS_ACCELERATOR": device, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "proof.py")
        script.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", ranks.__name__, str(script), *SIDES]
        with Path(folder, "log").open("wb") as log, subprocess.Popen(
            command, env=theirs, stdin=subprocess.PIPE, stdout=log, stderr=log,
            start_new_session=True,
        ) as started:  # fmt: skip
            try:
                _running.add(started.pid)
                with suppress(subprocess.TimeoutExpired):
                    started.wait(_PATIENCE)
            finally:  # also of an interruption
                _running.remove(started.pid)
                _end(started.pid)
        return {side: _outcome(script, side) for side in SIDES}


def _end(*groups: int) -> None:
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


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
