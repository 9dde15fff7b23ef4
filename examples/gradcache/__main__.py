"""`python -m examples.gradcache`: train stock and with blocks, compare. See the package."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version
from typing import Any

from examples import ranks

_DESCRIPTION = (
    "Train by GradCache at ZeRO 1, 2 and 3, stock and with one reduction per step, and compare "
    "with plain PyTorch. Exits with 0 if the runs with a block are right. Under torchrun this is "
    "one rank; without it, two CPU ranks are started."
)
_LINE = "{:<26}{:>10}" + 4 * "{:>8}" + "{:>12}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.gradcache", description=_DESCRIPTION)
    parser.add_argument("--steps", type=int, default=30, help="steps to train (default 30)")
    steps = parser.parse_args().steps
    if "RANK" in os.environ:
        return compare(steps)
    return ranks.start("examples.gradcache", *sys.argv[1:])


def compare(steps: int) -> int:
    """Return 0 if every run with a block is right, else 1; the same on all ranks."""
    shown = ranks.join()

    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    import ds_patches
    from examples.gradcache.curves import Curve, Work, cached, full_batch

    def say(text: str = "") -> None:
        print(text.rstrip(" "), file=shown)

    def show(name: str, curve: Curve, difference: str) -> None:
        sent = ", ".join(map(str, sorted(curve.reductions))) or "-"
        losses = (f"{curve.losses[number - 1]:.4f}" for number in shown_steps)
        say(_LINE.format(name, sent, *losses, difference))

    def trained(stage: int, name: str, **how: Any) -> str:
        """Print a run, and return its fault, or ""."""
        curve = cached(stage, work, **how)
        if curve.error:
            say(f"ZeRO-{stage}, {name:<20}{curve.error}"[:80])
        else:
            show(f"ZeRO-{stage}, {name}", curve, f"{curve.off(plain):.1e}")
        fault = curve.fault(plain)
        return fault and f"ZeRO-{stage}: {fault}"

    work, device = Work(steps), get_accelerator().current_device_name()
    shown_steps = [1 + part * (steps - 1) // 3 for part in range(4)]
    say("GradCache: find the other half of a handwritten digit")
    say(f"  DeepSpeed {version('deepspeed')}, torch {version('torch')}, {device}")
    many = f"{work.chunks} chunks on each of {dist.get_world_size()} ranks"
    say(f"  each step {work.batch} digits, in {many}\n")
    say(_LINE.format("", "reductions", "", "", "", "loss at", "largest"))
    say(_LINE.format("", "per step", *(f"step {number}" for number in shown_steps), "difference"))
    plain = full_batch(work)
    show("plain PyTorch, one batch", plain, "-")
    for stage in (1, 2, 3):
        trained(stage, "stock", block=False)
    ds_patches.apply("coalesce")
    faults = [trained(stage, "one block", block=True) for stage in (1, 2, 3)]
    if not plain.losses[-1] < plain.losses[0]:
        faults.append("plain PyTorch does not learn")
    say()
    for fault in filter(None, faults):
        say(f"FAILED: {fault}")
    if not any(faults):
        say("With a block, ZeRO trains as plain PyTorch does on the whole batch.")
    dist.destroy_process_group()
    return int(any(faults))


if __name__ == "__main__":
    sys.exit(main())
