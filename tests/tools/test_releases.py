"""The page of releases, which a tool writes."""

from packaging.version import Version

from ds_patches.core import registry, release
from tools.releases import RELEASES, record


def test_a_patch_supports_releases_that_it_passed_on() -> None:
    """Whoever moves a range runs the releases again."""
    rows = record.read()
    for name, patch in registry.patches().items():
        for version in RELEASES:
            cell = rows[version, "2.13.0"].get(name, "-")
            is_covered = release.covers(patch.supported, Version(version))
            expected = "pass" if is_covered else "out of range"
            assert cell.startswith(expected), (name, version)
