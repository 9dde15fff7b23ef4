"""The launchers of one host: every rank is patched, by `run` or by an enabled environment."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from tests import shell
from tests.core import fake
from tests.launchers import launch
from tests.launchers.launch import assert_patched, assert_stock, block, line_with


def test_torchrun(folder: Path) -> None:
    line = line_with("run -- torchrun --standalone")
    assert_patched(launch.run(line, folder, launch.environment(folder)))


@pytest.mark.exhaustive
def test_deepspeed(folder: Path) -> None:
    line = line_with("run -- deepspeed --num_gpus")
    line = fake.edited(line, "--num_gpus", f"--master_port {launch.free_port()} --num_gpus")
    assert_patched(launch.run(line, folder, launch.environment(folder)))


@pytest.mark.exhaustive
def test_accelerate(folder: Path) -> None:
    line = line_with("accelerate launch --use_deepspeed --deepspeed_config_file")
    line = fake.edited(line, "launch", f"launch --main_process_port {launch.free_port()}")
    assert_patched(launch.run(line, folder, launch.environment(folder)))


@pytest.mark.exhaustive
def test_spawn(folder: Path) -> None:
    line = line_with("run -- python spawn.py")
    assert_patched(launch.run(line, folder, meeting(folder)))


@pytest.mark.exhaustive
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: it is the extra `ray`"
)
def test_ray(folder: Path) -> None:
    """The driver's own environment has no wish: the actors have theirs from Ray."""
    script = (folder / "actors.py").read_text(encoding="utf-8").splitlines()
    assert set(block("python", "ray.init").splitlines()) <= set(script)
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # its sockets have their names there
        environment = meeting(folder) | {"RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        assert_patched(launch.run("python actors.py", folder, environment))


@pytest.mark.exhaustive
def test_an_enabled_environment(folder: Path, tmp_path: Path) -> None:
    """It needs no `run` and no PYTHONPATH; disabled, it is stock again."""
    venv = borrowing_environment(tmp_path / "venv")
    path = f"{venv / 'bin'}:{launch.environment(folder)['PATH']}"
    environment = launch.environment(folder, PATH=path, PYTHONPATH="")
    line = line_with("DS_PATCHES=all torchrun")

    def ds_patches(command: str) -> None:
        words = line_with(f"ds_patches {command}").split()
        subprocess.run(words, env=environment, check=True, timeout=launch.SECONDS)

    ds_patches("enable")
    assert_patched(launch.run(line, folder, environment))
    for report in (folder / launch.REPORTS).iterdir():
        report.unlink()

    ds_patches("disable")
    assert_stock(launch.run(line, folder, environment))


@pytest.mark.exhaustive
def test_ranks_that_differ(folder: Path) -> None:
    """Every rank says which ranks have what, whichever is the first."""
    line = line_with("run -- torchrun --standalone")
    line = fake.edited(line, "train.py", "--no-python sh uneven.sh")
    run = launch.run(line, folder, launch.environment(folder))
    assert run.code, run
    assert not run.reports, run
    for rank in range(2):
        trouble = (
            rf"\[rank{rank}\]: \S*RanksDisagree: the ranks of this engine differ: "
            r"coalesce is live on rank 0, "
            r"disabled \(DS_PATCHES_SKIP=coalesce\) on rank 1$"
        )
        assert re.search(trouble, run.output, re.M), run


def meeting(folder: Path) -> dict[str, str]:
    """For ranks without a launcher to tell them where to meet."""
    return launch.environment(folder, MASTER_ADDR="127.0.0.1", MASTER_PORT=launch.free_port())


def borrowing_environment(folder: Path) -> Path:
    """A virtual environment of its own that has the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.check_output([python, "-c", code], text=True, timeout=60).strip()
    packages = [launch.location(name) for name in ("deepspeed", "torch")]
    lent = [shell.REPOSITORY, *packages, sysconfig.get_path("purelib")]
    Path(site, "lent.pth").write_text("\n".join(map(str, lent)) + "\n", encoding="utf-8")
    script = "import sys\nfrom torch.distributed.run import main\nsys.exit(main())\n"
    torchrun = folder / "bin" / "torchrun"
    torchrun.write_text(f"#!{python}\n{script}", encoding="utf-8")
    torchrun.chmod(0o755)
    return folder
