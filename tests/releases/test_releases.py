"""What the releases' page claims."""

from pathlib import Path

import pytest
from packaging.version import Version

from ds_patches.core import registry, release
from tests.releases import RELEASES, measure, record

PRINTED = """\
DeepSpeed 0.19.5 on 2 x H100, torch 2.11.0
          stock            patched
fp16      off by 0.96      off by 3.2e-05
muon      off by 0         off by 0         not shown
retained  RuntimeError     off by 0
"""
PAGE = """\
| proof | 0.18.4 | 0.19.5 |
| --- | --- | --- |
| fp16 | 1; 0 | - |
| gone | - | 1; 0 |
| on | a GPU; then | - |
"""


def test_a_patch_supports_releases_that_it_passed_on() -> None:
    """Whoever moves a range runs the releases again."""
    rows = record.read()
    for name, patch in registry.patches().items():
        for one in RELEASES:
            found = rows[one, "2.13.0"].get(name, "-")
            expected = "pass" if release.covers(patch.supported, Version(one)) else "out of range"
            assert found.startswith(expected), (name, one)


def test_a_column_is_written_among_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(measure, "PAGE", page)
    page.write_text(f"<!-- gpus -->\n\n{PAGE}\n<!-- end gpus -->\n")
    measure.write_column("0.19.5", PRINTED, "now")
    assert [line for line in page.read_text().splitlines() if line[:2] == "| "] == [
        "| proof | 0.18.4 | 0.19.5 |",
        "| --- | --- | --- |",
        "| fp16 | 1; 0 | 0.96; 3.2e-05 |",
        "| muon | - | **0; 0** |",
        "| retained | - | RuntimeError; 0 |",
        "| on | a GPU; then | 2 x H100, torch 2.11.0; now |",
    ]
