"""`prove`: a row of what is wrong here, trained by plain PyTorch, stock and patched DeepSpeed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from ds_patches import proofs
from ds_patches.core import columns, flags, release
from ds_patches.core.errors import DsPatchesError, FlagError, nearest
from ds_patches.core.symptom import Symptom, plain
from ds_patches.symptoms import CURED

SIDES = ("PyTorch", "stock", "patched")
#: Exit statuses: patched is right; it is not; nobody can tell.
RIGHT, WRONG, UNKNOWN = 0, 1, 2
#: Of what PyTorch learns: half precision is off by 3e-4, and the smallest defect by 1e-2.
ROUNDING = 1e-3
_BARS = "▁▂▃▄▅▆▇█"
_PATIENCE = 180  # seconds
# On a CPU, DeepSpeed compiles a collective by g++ for half a minute, unless its own table says no.
_RANK = """
import runpy, sys, deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
if sys.argv.pop(1) == "patched":
    import ds_patches
    ds_patches.apply_all()
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


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
        return self.error or f"off by {self.off(other):.2g}"

    def is_right(self, other: Run) -> bool:
        return not self.error and self.off(other) <= ROUNDING  # and no NaN


def listed() -> int:
    """Print the rows that this release has and a CPU can show."""
    here = _here()
    found = {one.proof: one for one in reversed(CURED) if one.proof and one.is_wrong(here)}
    print(f"what DeepSpeed {here} gets wrong, and `ds-patches prove NAME` shows:")
    rows = [(name, _row(one)) for name, one in reversed(found.items())]
    print(*(f"  {line}" for line in columns.aligned(rows)), sep="\n")
    return RIGHT


def prove(name: str, picture: Path | None, *, script: bool) -> int:
    """Train the script of a row on all sides, and print what they come to; or print it."""
    rows = [one for one in CURED if one.proof == name]
    if not rows:
        known = [one.proof for one in CURED if one.proof]
        raise FlagError(f"no proof is named {name!r}{nearest(name, known)}: `ds-patches prove`")
    if picture:
        _matplotlib()
    here = _here()
    row = next((one for one in rows if one.is_wrong(here)), rows[-1])
    title = f"{plain(row.script)}: {plain(row.outcome)}"
    stage = _stage(row)
    text = proofs.compose(name, stage, f"{title} (DeepSpeed {here}, ZeRO {stage})")
    if script:
        print(text, end="")
        return RIGHT
    print(f"{title}\nDeepSpeed {here}, ZeRO {stage}, two CPU ranks, patch {row.patch}\n")
    return compare(text, title, picture)


def compare(text: str, title: str, picture: Path | None = None) -> int:
    """Run a reproducer on all sides, and print what they come to; returns the exit status."""
    runs = _train(text)
    expected, stock, patched = (runs[side] for side in SIDES)
    if expected.error:
        raise DsPatchesError(f"plain PyTorch does not train: {expected.error}")
    print("\n".join(_table(runs)))
    print(f"\nstock {stock.told(expected)}; patched {patched.told(expected)}")
    verdicts = [f"{n} is {'right' if runs[n].is_right(expected) else 'wrong'}" for n in SIDES[1:]]
    print(f"verdict: {', '.join(verdicts)}")
    if picture:
        _draw(runs, title, picture)
    return RIGHT if patched.is_right(expected) else WRONG


def _here() -> Version:
    found = release.installed()
    if not found or not found.version:
        raise DsPatchesError("prove needs an installed DeepSpeed")
    return found.version


def _stage(one: Symptom) -> int:
    stage = proofs.PROOFS[one.proof].stage
    return one.stages[-1] if stage is None else stage


def _row(one: Symptom) -> str:
    return f"ZeRO {_stage(one)}  {plain(one.script)}: {plain(one.outcome)}"


def _train(text: str) -> dict[str, Run]:
    """All sides at once, each in two processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "proof.py")
        file.write_text(text, encoding="utf-8")
        ranks = {side: [*_start(file, side)] for side in SIDES}
        until = time.monotonic() + _PATIENCE
        failed: dict[str, int] = {}
        while any(one.poll() is None for its in ranks.values() for one in its):
            for side, its in ranks.items():
                ended = [at for at, one in enumerate(its) if one.poll()]
                if ended and failed.setdefault(side, ended[0]) == ended[0]:
                    with suppress(subprocess.TimeoutExpired):
                        its[1 - ended[0]].wait(5)
                if ended or time.monotonic() > until:
                    for one in its:
                        one.kill()
            time.sleep(0.1)
        return {side: _outcome(file, side, failed.get(side, 0)) for side in SIDES}


def _start(file: Path, side: str) -> Iterator[subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    theirs = {k: v for k, v in os.environ.items() if not k.startswith(flags.PREFIX)}
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    world |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    engine = "PyTorch" if side == "PyTorch" else "DeepSpeed"
    for rank in "01":
        with _log(file, side, rank).open("wb") as log:
            yield subprocess.Popen(
                [sys.executable, "-c", _RANK, side, file, engine],
                env=theirs | world | {"RANK": rank, "LOCAL_RANK": rank},
                stdout=log,
                stderr=log,
            )


def _log(file: Path, side: str, rank: str) -> Path:
    return file.with_name(f"{side}.{rank}")


def _outcome(file: Path, side: str, rank: int) -> Run:
    log = _log(file, side, str(rank)).read_text("utf-8", errors="replace")
    if found := re.search(r"^(?:PyTorch|DeepSpeed)((?: [-+.\w]+)+)$", log, re.M):
        return Run(tuple(map(float, found[1].split())))
    last = log.rpartition("Traceback (most recent call last):")[2]
    error = re.search(r"^\w.*$", last, re.M)
    return Run(error=error[0] if error else "no answer: it hangs, or was killed")


def _table(runs: Mapping[str, Run]) -> Iterator[str]:
    trained = {side: one.losses for side, one in runs.items() if one.losses}
    steps = [(str(at), *(f"{loss:.4f}" for loss in losses))
             for at, losses in enumerate(zip(*trained.values(), strict=True), 1)]  # fmt: skip
    yield from columns.aligned([("step", *trained), *steps])
    yield ""
    top = max(runs["PyTorch"].losses)
    yield from columns.aligned([(side, _sparks(losses, top)) for side, losses in trained.items()])


def _sparks(losses: tuple[float, ...], top: float) -> str:
    heights = (max(0.0, min(1.0, loss / top)) if loss == loss else 1.0 for loss in losses)
    return "".join(_BARS[round(height * (len(_BARS) - 1))] for height in heights)


def _matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FlagError("--svg needs matplotlib: pip install 'ds-patches[plot]'") from error


def _draw(runs: Mapping[str, Run], title: str, file: Path) -> None:
    """Curves on no background, in colours that are seen on white and on black."""
    import matplotlib
    from matplotlib.figure import Figure

    grey = "#808080"
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context({**dict.fromkeys(names, grey), "svg.hashsalt": "ds_patches"}):
        figure = Figure(figsize=(7, 3.6), layout="tight")
        axes = figure.add_subplot(xlabel="step", ylabel="loss", title=title)
        axes.spines[["top", "right"]].set_visible(False)
        looks = {
            "PyTorch": (grey, "-", 5),
            "stock": ("#d9534f", "-", 2),
            "patched": ("#2f9e6e", "--", 2),
        }
        for side, (colour, line, width) in looks.items():
            losses = runs[side].losses
            label = "plain PyTorch" if side == "PyTorch" else f"{side} DeepSpeed"
            label += ": crashes" * (not losses)
            steps = range(1, len(losses) + 1)
            axes.plot(steps, losses, line, color=colour, linewidth=width, label=label)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
