"""What the terminal shows: one line per run, of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from typing import TextIO

import torch.distributed as dist

from examples.gradcache.curves import Curve, Work

_LINE = "{:<26}{:>10}" + 4 * "{:>8}" + "{:>12}"
_NONE = "-"


class Table:
    """Written by the first rank, run by run."""

    def __init__(self, work: Work, device: str, into: TextIO) -> None:
        self._into = into if dist.get_rank() == 0 else None
        self._steps = [1 + part * (work.steps - 1) // 3 for part in range(4)]
        ranks = dist.get_world_size()
        self._say("GradCache: find the other half of a handwritten digit")
        self._say(f"  DeepSpeed {version('deepspeed')}, torch {version('torch')}, {device}")
        self._say(
            f"  each step {work.batch} digits, in {work.chunks} chunks on each of {ranks} ranks"
        )
        self._say()
        self._say(_LINE.format("", "reductions", "", "", "", "loss at", "largest"))
        numbers = (f"step {number}" for number in self._steps)
        self._say(_LINE.format("", "per step", *numbers, "difference"))

    def show(self, name: str, curve: Curve, plain: Curve | None = None) -> None:
        """plain: what it is to equal."""
        if curve.error:
            self._say(f"{name:<28}{curve.error}"[:80])
            return
        sent = ", ".join(map(str, sorted(curve.reductions))) or _NONE
        losses = (f"{curve.losses[number - 1]:.4f}" for number in self._steps)
        self._say(_LINE.format(name, sent, *losses, f"{curve.off(plain):.1e}" if plain else _NONE))

    def verdict(self, faults: Sequence[str]) -> None:
        self._say()
        for fault in faults:
            self._say(textwrap.fill(f"FAILED: {fault}", 80))
        if not faults:
            self._say("With a block, ZeRO trains as plain PyTorch does on the whole batch.")

    def _say(self, text: str = "") -> None:
        if self._into is not None:
            print(text.rstrip(), file=self._into, flush=True)
