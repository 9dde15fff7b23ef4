"""docs/cluster.md: the steps of an image, in an empty environment, and the prolog, by bash."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core import fake
from tests.distribution.test_distribution import NAME, built, environment, link_deepspeed, run

__all__ = ["built"]
PAGE = (fake.REPOSITORY / "docs/cluster.md").read_text(encoding="utf-8")


def block(words: str) -> str:
    blocks = re.findall(r"^```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if words in block)
    return str(found)


@pytest.mark.exhaustive
def test_an_image(built: Path, tmp_path: Path) -> None:
    """The commands of its last line, and then one who uninstalls without a thought."""
    (steps,) = re.findall("^RUN (.+)$", block("FROM"), re.MULTILINE)
    install, *others = steps.split(" && ")
    assert install.startswith("pip install ")
    assert others == ["python -m ds_patches enable", "python -m ds_patches doctor"]
    command, site = environment(tmp_path / "env", built)
    run("-m", "ds_patches", "enable", cwd=tmp_path, python=command)
    doctor = [command, "-m", "ds_patches", "doctor"]
    assert subprocess.run(doctor, capture_output=True).returncode == 2, "there is no DeepSpeed"
    link_deepspeed(site)
    assert subprocess.run(doctor, capture_output=True).returncode == 0

    pip = [sys.executable, "-m", "pip", "--python", command, "uninstall", "-q", "-y", "ds_patches"]
    subprocess.run(pip, check=True)
    assert (site / "ds_patches.pth").exists(), NAME
    for variables in ({}, {"DS_PATCHES": "all"}, {"DS_PATCHES": "all", "DS_PATCHES_STRICT": "1"}):
        words = [command, "-c", "print(42)"]
        done = subprocess.run(words, env=variables, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")


def test_the_prolog(tmp_path: Path) -> None:
    text = fake.edited(block("SLURM_JOB_ID"), "/etc/ds_patches.off", f"{tmp_path}/off")
    script = fake.write(tmp_path / "prolog", text)

    def said(**variables: str) -> str:
        own = {"HOME": str(tmp_path), "SLURM_JOB_ID": "7", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(["bash", script], env=own | variables, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    file = tmp_path / ".ds_patches/7.json"
    assert said() == f"export DS_PATCHES=all\nexport DS_PATCHES_STATUS_FILE={file}\n"
    assert file.parent.is_dir()
    assert said(DS_PATCHES="none") == "", "one job's own word"
    (tmp_path / ".no_ds_patches").touch()
    assert said() == ""
    (tmp_path / ".no_ds_patches").unlink()
    (tmp_path / "off").touch()
    assert said() == ""
