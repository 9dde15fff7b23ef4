"""What the releases' page claims."""

from packaging.version import Version

from ds_patches.core import registry, release
from tests.releases import RELEASES, record


def test_a_patch_supports_releases_that_it_passed_on() -> None:
    """Whoever moves a range runs the releases again."""
    rows = record.read()
    for name, patch in registry.patches().items():
        for one in RELEASES:
            found = rows[one, "2.13.0"].get(name, "-")
            expected = "pass" if release.covers(patch.supported, Version(one)) else "out of range"
            assert found.startswith(expected), (name, one)
