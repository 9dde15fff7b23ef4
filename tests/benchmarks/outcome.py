"""What a benchmark printed and kept, when it was run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Outcome:
    """What a run printed and what it kept."""

    def __init__(self, printed: str, kept: dict[str, Any]) -> None:
        self.printed = printed
        self.kept = kept

    def table(self, first_header: str, below: str = "") -> list[list[str]]:
        """The cells of the first Markdown table below these words that has this first column."""
        lines = self.printed[self.printed.index(below) :].splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_header} |"))
        body = []
        for line in lines[start + 2 :]:
            if not line.startswith("|"):
                break
            body.append([cell.strip() for cell in line.strip("|").split("|")])
        return body


def outcome_of(command: str, kept: Path, **variables: str) -> Outcome:
    """Run a benchmark, whose last option is for the file that it keeps everything in."""
    done = subprocess.run(
        [sys.executable, *command.split(), str(kept)],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Outcome(done.stdout, json.loads(kept.read_text()))
