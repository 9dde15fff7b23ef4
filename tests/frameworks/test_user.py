"""The scripts are their users' alone."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPTS = sorted(Path(__file__).with_name("user").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_no_script_knows_of_the_patches(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert "ds_patches" not in text
    assert "DS_PATCHES" not in text
