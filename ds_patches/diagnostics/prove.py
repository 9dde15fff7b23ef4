"""`prove`: trains a defect's script by plain PyTorch, stock and patched DeepSpeed."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from packaging.version import Version

from ds_patches.core import columns, flags, release
from ds_patches.core.errors import DsPatchesError, FlagError, nearest
from ds_patches.diagnostics import findings, plot, proofs
from ds_patches.diagnostics.defects import Defect, plain, wrong_in
from ds_patches.diagnostics.proofs import ranks
from ds_patches.diagnostics.report import wrapped

SIDES = ("PyTorch", "stock", "patched")
#: Exit statuses: patched is right; it is not.
RIGHT, WRONG = 0, 1
#: The largest `Run.off` that is right: half precision is off by 3e-4, the smallest defect by 1e-2.
ROUNDING = 1e-3
#: Seconds until a proof counts as hanging.
_TIMEOUT = 300


@dataclass(frozen=True)
class Run:
    """One side's losses by step, or the first line of its error.

    expected: the losses of plain PyTorch.
    """

    losses: tuple[float, ...] = ()
    error: str = ""
    expected: tuple[float, ...] = ()

    @property
    def off(self) -> float:
        """The largest difference from PyTorch's losses, relative to their range.

        Infinite for an error or a loss that is not finite, which `max` would ignore.
        """
        pairs = [] if self.error else zip(self.losses, self.expected, strict=True)
        gaps = [abs(loss - expected) for loss, expected in pairs] or [math.inf]
        largest = max(gaps) if all(map(math.isfinite, gaps)) else math.inf
        return largest / (max(self.expected) - min(self.expected))

    @property
    def is_right(self) -> bool:
        return self.off <= ROUNDING

    @property
    def brief(self) -> str:
        """The exception's name, or `off` as text."""
        return name_of(self.error) or f"off by {self.off:.2g}"

    def as_json(self) -> dict[str, Any]:
        """Return the run with losses as texts, since JSON has no NaN."""
        off = None if self.error else str(self.off)
        losses = [*map(str, self.losses)]
        return {"losses": losses, "error": self.error, "off": off, "right": self.is_right}


def name_of(error: str) -> str:
    """Return the name of an error's exception, without its module; "" for ""."""
    return re.sub(r"^(\w+\.)*(\w+)\b.*", r"\2", error, flags=re.S)


def print_proofs(*, as_json: bool = False) -> int:
    """Print the proofs of the installed release's defects."""
    defects = shown(installed := _installed())
    results = [
        {"name": name, "row": _title(name, defect), "needs": _device_needed(name) or None}
        for name, defect in defects.items()
    ]
    if as_json:
        return _print_json(RIGHT, results)
    print(f"defects of DeepSpeed {installed} that `ds-patches prove NAME` shows:")
    width = max(map(len, defects), default=0)
    for name, row, needs in map(dict.values, results):
        text = f"{row} ({needs})" if needs else str(row)
        print("\n".join(wrapped(f"  {name:<{width}}  ", text)))
    return RIGHT


def shown(version: Version) -> dict[str, Defect]:
    """Return the defects of a release that a patch fixes, by the names of their proofs."""
    by_proof: dict[str, Defect] = {}
    for defect in wrong_in(version):
        is_cured = version >= Version(findings.floor(defect) or defect.first)
        if defect.proof and is_cured:
            by_proof.setdefault(defect.proof, defect)
    return by_proof


def prove(
    name: str, svg: Path | None = None, *, device: str | None = None, as_json: bool = False
) -> int:
    """Train a proof's script on all sides and print the losses; return the exit status.

    svg: the file to plot the losses into. device: "cpu" or "cuda"; by default DeepSpeed's choice.
    Raises FlagError if the proof does not exist or cannot run on the device.
    """
    title, text = composed(name)
    if svg:
        plot.check(svg)
    device = _device(device or ("cpu" if "cpu" in proofs.PROOFS[name].only else None))
    if device_needed := _device_needed(name, device):
        raise FlagError(f"{name} {device_needed}")
    if not as_json:
        print(f"{title}\n", flush=True)
    runs = train(text, device)
    if svg:
        plot.draw(title, {side: run.losses for side, run in runs.items()}, svg)
    status = RIGHT if runs["patched"].is_right else WRONG
    if as_json:
        sides = {side: run.as_json() for side, run in runs.items()}
        return _print_json(status, {"title": title, "device": device, **sides})
    print(*table(runs), sep="\n")
    return status


def prove_all(device: str | None = None, *, as_json: bool = False) -> int:
    """Run all proofs of the installed release and print a line for each; return the exit status.

    device: as for `prove`. A proof that needs another one is not run.
    """
    names, device = [*shown(installed := _installed())], _device(device)
    width = max(map(len, names), default=0)
    if not as_json:
        print(f"DeepSpeed {installed} on {hardware(device)}", flush=True)
        print(f"{'':<{width}}  {'stock':<22}  patched", flush=True)
    results = []
    # Each proof runs six processes. After an interruption nothing waits for the pool's threads.
    with ThreadPool(max(1, (os.cpu_count() or 1) // 6)) as pool:
        outcomes = pool.imap(lambda name: _brief(name, device), names)
        for name, (is_shown, sides) in zip(names, outcomes, strict=True):
            if not as_json:
                notes = [] if is_shown else ["not shown"]
                cells = "  ".join(f"{cell:<22}" for cell in [*sides, *notes])
                print(f"{name:<{width}}  {cells}".rstrip(), flush=True)
            results.append({"name": name, "shown": is_shown, "sides": sides})
    status = RIGHT if all(result["shown"] for result in results) else WRONG
    return _print_json(status, results) if as_json else status


def _brief(name: str, device: str) -> tuple[bool, list[str]]:
    """Run a proof; return True unless it fails to show the defect, and the cells of its line."""
    if device_needed := _device_needed(name, device):
        return True, [device_needed]
    try:
        runs = train(composed(name)[1], device)
    except DsPatchesError as error:
        return False, [str(error)]
    is_shown = runs["patched"].is_right and not runs["stock"].is_right
    return is_shown, [runs[side].brief for side in SIDES[1:]]


def composed(name: str) -> tuple[str, str]:
    """Return the title of a proof, and its script, which needs only DeepSpeed and torch."""
    if name not in proofs.PROOFS:
        guess = nearest(name, proofs.PROOFS)
        raise FlagError(f"no proof is named {name!r}{guess}; `ds-patches prove` lists them")
    installed = _installed()
    older = [defect for defect in wrong_in() if defect.proof == name]
    defect = shown(installed).get(name, older[-1])
    title = f"DeepSpeed {installed}, {_title(name, defect)}"
    return title, proofs.compose(name, _stage(name, defect), title)


def table(runs: dict[str, Run]) -> Iterator[str]:
    """Yield the lines of the losses by step, of how far off each side is, and of the verdict."""
    trained = {side: run.losses for side, run in runs.items() if run.losses}
    steps = enumerate(zip(*trained.values(), strict=True), 1)
    rows = [(str(step), *(f"{loss:.4f}" for loss in losses)) for step, losses in steps]
    yield from (*columns.aligned([("step", *trained), *rows]), "")
    for side in SIDES[1:]:
        result = runs[side].error or f"{runs[side].brief} of what PyTorch learns"
        yield f"{side + ':':<8} {result}"
    verdicts = [f"{side} is {'right' if runs[side].is_right else 'wrong'}" for side in SIDES[1:]]
    yield f"verdict: {', '.join(verdicts)}"


def _print_json(status: int, results: Any) -> int:
    print(json.dumps({"status": status, "results": results}, indent=2))
    return status


def _installed() -> Version:
    installed = release.installed()
    if not installed or not installed.version:
        raise DsPatchesError("prove needs DeepSpeed: install it for this Python")
    return installed.version


def _device(option: str | None) -> str:
    """Return "cuda" or "cpu": the option, or the one that DeepSpeed would choose."""
    import torch

    has_gpu = torch.cuda.is_available()
    if option == "cuda" and not has_gpu:
        raise FlagError("--device cuda: torch finds no GPU")
    wanted = option or os.environ.get("DS_ACCELERATOR", "cuda")
    return "cuda" if wanted == "cuda" and has_gpu else "cpu"


def hardware(device: str) -> str:
    """Return what the ranks of a proof run on, and the version of torch."""
    import torch

    count = min(torch.cuda.device_count(), ranks.RANKS)
    gpus = f"{count} x {torch.cuda.get_device_name()}" if device == "cuda" else "two CPU ranks"
    return f"{gpus}, torch {torch.__version__}"


def _device_needed(name: str, device: str = "") -> str:
    """Return why a proof needs another device; "" if it does not."""
    if not (only := proofs.PROOFS[name].only) or device in only:
        return ""
    return f"needs a {'CPU' if 'cpu' in only else 'GPU'}: {only[1]}"


def _stage(name: str, defect: Defect) -> int:
    stage = proofs.PROOFS[name].stage
    return defect.stages[-1] if stage is None else stage


def _title(name: str, defect: Defect) -> str:
    return f"ZeRO {_stage(name, defect)}: {plain(defect.script)}: {plain(defect.outcome)}"


def train(text: str, device: str) -> dict[str, Run]:
    """Train on all sides at once, each in its own processes. Raises if PyTorch's side fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(flags.PREFIX)}
    environment |= {"DS_ACCELERATOR": device, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        script = Path(folder, "proof.py")
        script.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", ranks.__name__, str(script), *SIDES]
        # At the end of the block, also after an interruption, the pipe closes: this ends all ranks.
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        ) as process, suppress(subprocess.TimeoutExpired):  # fmt: skip
            process.wait(_TIMEOUT)
        runs = {side: _outcome(script, side) for side in SIDES}
    if error := runs["PyTorch"].error:
        raise DsPatchesError(f"plain PyTorch does not train: {error}")
    return {side: replace(run, expected=runs["PyTorch"].losses) for side, run in runs.items()}


def _outcome(script: Path, side: str) -> Run:
    files = sorted(script.parent.glob(f"{side}.[0-9]"))
    logs = [file.read_text("utf-8", errors="replace") for file in files]
    number = r"-?(?:[\d.]+(?:e[-+]\d+)?|nan|inf)"
    if losses := re.search(rf"^(?:PyTorch|DeepSpeed)((?: {number})+)$", "\n".join(logs), re.M):
        return Run(tuple(map(float, losses[1].split())))
    # A rank that fails because another one failed logs that its connection was closed: last.
    for text in sorted(logs, key=lambda text: "Connection closed by peer" in text):
        last = text.rpartition("Traceback (most recent call last):\n")[2]
        if error := last != text and re.search(r"^\w.*$", last, re.M):
            return Run(error=error[0])
    return Run(error="hangs: neither losses nor a traceback")
