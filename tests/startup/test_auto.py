"""`import ds_patches.auto` is `apply_all()`, with the flags of the environment."""

from __future__ import annotations

from pathlib import Path

from tests.core import fake

SHOW = """
import ds_patches.auto
print(ds_patches.status()["sample"].state.value)
"""


def test_the_import_applies(tmp_path: Path) -> None:
    code = fake.with_patches(fake.patch_folder(tmp_path / "patches")) + SHOW
    installation = fake.deepspeed(tmp_path / "ds")
    assert fake.output(code, installation) == "applied\n"
    assert fake.output(code, installation, DS_PATCHES="none") == "disabled\n"
