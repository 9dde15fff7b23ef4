"""Fixtures of the launches."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ds_patches.startup import command
from tests import shell
from tests.launchers import launch
from tests.startup.environment import INSTALLED


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the user's folder, to launch in, with an empty one for the ranks' reports."""
    copied = Path(shutil.copytree(Path(__file__).with_name("user"), tmp_path / "user"))
    (copied / launch.REPORTS).mkdir()
    return copied


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """An environment that has the packages of this one, and the start-up hook of a wheel."""
    root = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True, timeout=60)
    python = root / "bin" / "python"
    (site,) = root.glob("lib/python*/site-packages")
    packages = [launch.location(name) for name in ("deepspeed", "torch")]
    lent = [shell.REPOSITORY, *packages, sysconfig.get_path("purelib")]
    (site / "lent.pth").write_text("\n".join(map(str, lent)) + "\n", encoding="utf-8")
    runner, run = "deepspeed.launcher.runner", "torch.distributed.run"
    commands = {"deepspeed": runner, "ds-patches": "ds_patches.__main__", "torchrun": run}
    for name, module in commands.items():
        program = root / "bin" / name
        script = f"#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
        program.write_text(script, encoding="utf-8")
        program.chmod(0o755)
    for name, source in INSTALLED.items():
        shutil.copy(command.HOOK / source, site / name)
    return root
