"""`python -m examples.gradcache`: train stock and with blocks, compare. See the package."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

from examples.gradcache import rank

_RANKS = 2
_TAIL_LINES = 60
_DESCRIPTION = (
    "Train by GradCache at ZeRO 1, 2 and 3, stock and with one reduction per step, and compare "
    "with plain PyTorch. Exits with 0 if the runs with a block are right. Run by torchrun it is "
    "one rank; else it starts two, on CPU."
)


def main() -> int:
    steps = _parser().parse_args().steps
    return rank.main(steps) if "RANK" in os.environ else launch()


def launch() -> int:
    """Run this again on two CPU ranks; what they print beside the table is shown if they fail."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_RANKS}")
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        done = subprocess.run(
            [sys.executable, *torchrun, "-m", "examples.gradcache", *sys.argv[1:]],
            env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            stderr=printed,
        )
        if done.returncode:
            printed.seek(0)
            print(*printed.readlines()[-_TAIL_LINES:], sep="", end="", file=sys.stderr)
    return done.returncode


def _several(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"a whole number from 2 on, not {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.gradcache", description=_DESCRIPTION)
    parser.add_argument("--steps", type=_several, default=30, help="steps to train (default 30)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
