"""What the releases' page claims, and what is run on each release."""

import subprocess
import sys

import pytest
from packaging.version import Version

from ds_patches.core import registry, release
from tests.core import fake
from tests.releases import RELEASES, record
from tests.releases.run import marked_files


@pytest.mark.exhaustive
def test_no_core_case_is_in_another_file() -> None:
    def collected(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--disable-warnings"]
        command += ["-m", "core_case", *arguments]
        done = subprocess.run(command, cwd=fake.REPOSITORY, capture_output=True, text=True)
        return sorted(line for line in done.stdout.splitlines() if line.startswith("tests/"))

    assert collected(*marked_files()) == collected("tests") != []


def test_a_patch_supports_releases_that_it_passed_on() -> None:
    """Whoever moves a range runs the releases again."""
    rows = record.read()
    for name, patch in registry.patches().items():
        for one in RELEASES:
            found = rows[one, "2.13.0"].get(name, "-")
            expected = "pass" if release.covers(patch.supported, Version(one)) else "out of range"
            assert found.startswith(expected), (name, one)
