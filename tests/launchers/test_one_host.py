"""The launchers of one host: every rank is patched, by `run` or by a variable alone."""

import importlib.util
import tempfile
from pathlib import Path

import pytest

from tests.launchers import launch
from tests.launchers.launch import assert_patched, assert_stock, block, line_with

#: Words of the page's line, and after which of them the option for a port of the test's own is put.
LINES = {
    "torchrun": ("run -- torchrun --standalone", "", ""),
    "deepspeed": ("run -- deepspeed --num_gpus", "deepspeed", "--master_port"),
    "accelerate": ("--use_deepspeed --deepspeed_config_file", "launch", "--main_process_port"),
    "spawn": ("run -- python spawn.py", "", ""),
}


def meeting() -> dict[str, str]:
    """For ranks that no launcher tells where to meet."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": launch.free_port()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LINES)
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
def test_ray(folder: Path, installed: Path) -> None:
    """The driver's own environment has no wish: the actors have theirs from Ray."""
    script = (folder / "actors.py").read_text(encoding="utf-8").splitlines()
    assert set(block("python", "ray.init").splitlines()) <= set(script)
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # its sockets have their names there
        ray = {"RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        environment = launch.environment_of(installed, folder, **meeting(), **ray)
        assert_patched(launch.run("python actors.py", folder, environment))


@pytest.mark.exhaustive
def test_an_environment_that_has_it_installed(folder: Path, installed: Path) -> None:
    """Such an environment needs no `run` and no PYTHONPATH; without the variable it is stock."""
    environment = launch.environment_of(installed, folder)
    line = line_with("DS_PATCHES=all torchrun")
    assert_patched(launch.run(line, folder, environment))
    for report in (folder / launch.REPORTS).iterdir():
        report.unlink()
    assert_stock(launch.run(line.removeprefix("DS_PATCHES=all "), folder, environment))
