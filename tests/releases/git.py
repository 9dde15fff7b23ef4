"""What git says of the checkout that the tests are in."""

from __future__ import annotations

import subprocess

from tests.releases import ROOT


def says(*arguments: str) -> str:
    """git's answer; nothing where there is no git, no repository or no answer."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
