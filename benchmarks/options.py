"""Types of command-line options that the benchmarks share."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value
