"""The launchers of one host: every rank is patched, by `run` or by an enabled environment."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from tests import shell
from tests.launchers import launch
from tests.launchers.launch import assert_patched, assert_stock, block, line_with

#: Words of the page's line, and after which of them the option for a port of the test's own is put.
LINES = {
    "torchrun": ("run -- torchrun --standalone", "", ""),
    "deepspeed": ("run -- deepspeed --num_gpus", "deepspeed", "--master_port"),
    "accelerate": ("--use_deepspeed --deepspeed_config_file", "launch", "--main_process_port"),
    "spawn": ("run -- python spawn.py", "", ""),
}
QUICK = "torchrun"


def meeting() -> dict[str, str]:
    """For ranks that no launcher tells where to meet."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": launch.free_port()}


@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in LINES if n != QUICK)]
)
def test_launcher(folder: Path, name: str) -> None:
    words, before, option = LINES[name]
    port = (f" {before} ", f" {before} {option} {launch.free_port()} ")
    line = line_with(words, *[port] * bool(option))
    environment = launch.environment(folder, **meeting() if name == "spawn" else {})
    assert_patched(launch.run(line, folder, environment))


@pytest.mark.exhaustive
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: it is the extra `ray`"
)
def test_ray(folder: Path) -> None:
    """The driver's own environment has no wish: the actors have theirs from Ray."""
    script = (folder / "actors.py").read_text(encoding="utf-8").splitlines()
    assert set(block("python", "ray.init").splitlines()) <= set(script)
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # its sockets have their names there
        ray = {"RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        environment = launch.environment(folder, **meeting(), **ray)
        assert_patched(launch.run("python actors.py", folder, environment))


@pytest.mark.exhaustive
def test_an_enabled_environment(folder: Path, tmp_path: Path) -> None:
    """It needs no `run` and no PYTHONPATH; disabled, it is stock again."""
    venv = borrowing_environment(tmp_path / "venv")
    path = f"{venv / 'bin'}:{launch.environment(folder)['PATH']}"
    environment = launch.environment(folder, PATH=path, PYTHONPATH="")
    for command in ("enable", "disable"):
        words = line_with(f"ds-patches {command}").split()
        subprocess.run(words, env=environment, check=True, timeout=launch.SECONDS)
        run = launch.run(line_with("DS_PATCHES=all torchrun"), folder, environment)
        (assert_patched if command == "enable" else assert_stock)(run)
        for report in (folder / launch.REPORTS).iterdir():
            report.unlink()


def borrowing_environment(folder: Path) -> Path:
    """A virtual environment of its own that has the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.check_output([python, "-c", code], text=True, timeout=60).strip()
    packages = [launch.location(name) for name in ("deepspeed", "torch")]
    lent = [shell.REPOSITORY, *packages, sysconfig.get_path("purelib")]
    Path(site, "lent.pth").write_text("\n".join(map(str, lent)) + "\n", encoding="utf-8")
    commands = {"torchrun": "torch.distributed.run", "ds-patches": "ds_patches.__main__"}
    for name, module in commands.items():
        command = folder / "bin" / name
        script = f"#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
        command.write_text(script, encoding="utf-8")
        command.chmod(0o755)
    return folder
