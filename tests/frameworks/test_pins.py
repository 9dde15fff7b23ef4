"""The versions of docs/frameworks.md are those that each framework's own metadata allows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from packaging.requirements import Requirement

from tools.releases import ROOT

_PAGE = (ROOT / "docs" / "frameworks.md").read_text("utf-8")
_TABLE = re.search(r"^\| project \| DeepSpeed .*?(?=\n\n)", _PAGE, re.M | re.S)
assert _TABLE is not None
_TITLES, _, *ROWS = (
    [cell.strip() for cell in line.strip("|").split("|")] for line in _TABLE[0].splitlines()
)
PROJECTS = {"LLaMA-Factory": "llamafactory"}


def metadata(requirement: str) -> dict[str, Any]:
    """Return the metadata that the index has of a package."""
    command = ("install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report=-")
    done = subprocess.run(
        [sys.executable, "-m", "pip", *command, requirement], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"the index has no {requirement}")
    package: dict[str, Any] = json.loads(done.stdout)["install"][0]["metadata"]
    return package


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_pins(row: list[str]) -> None:
    name, version = row[0].split()
    project = PROJECTS.get(name, name.lower())
    asked = map(Requirement, metadata(f"{project}=={version}")["requires_dist"])
    # A package is asked for by an extra of its own name, too.
    needs = {
        (need.name.lower(), need.specifier)
        for need in asked
        if need.marker is None or need.marker.evaluate({"extra": need.name.lower()})
    }
    chosen = dict(zip(_TITLES[1:], row[1:], strict=True))
    for package, pinned in chosen.items():
        wanted = [specifier for name_, specifier in needs if name_ == package.lower()]
        assert all(specifier.contains(pinned) for specifier in wanted), (package, wanted)
