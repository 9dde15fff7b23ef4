"""docs/cluster.md: its prolog, by bash."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.core import fake

PAGE = (fake.REPOSITORY / "docs/cluster.md").read_text(encoding="utf-8")


def test_the_prolog(tmp_path: Path) -> None:
    blocks = re.findall(r"^```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (text,) = (block for block in blocks if "the kill switch" in block)
    script = fake.write(
        tmp_path / "prolog", fake.edited(text, "/etc/ds_patches.off", f"{tmp_path}/off")
    )

    def said(**variables: str) -> str:
        own = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(["bash", script], env=own | variables, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert said() == "export DS_PATCHES=all\n"
    assert said(DS_PATCHES="none") == "", "one job's own word"
    for switch in (".no_ds_patches", "off"):
        (tmp_path / switch).touch()
        assert said() == ""
        (tmp_path / switch).unlink()
