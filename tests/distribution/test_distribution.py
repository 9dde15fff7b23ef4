"""The wheel and the sdist are built, and the wheel runs beside DeepSpeed alone."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import packaging
import pytest

import ds_patches
from ds_patches.core import gate, registry, release
from tests.core import fake

NAME = f"ds_patches-{ds_patches.__version__}"


def run(*arguments: str, cwd: Path, python: str = sys.executable) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, *arguments], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built out of the sdist, which has what it is built of and no tests."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), cwd=fake.REPOSITORY)
    with tarfile.open(folder / f"{NAME}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    assert not (folder / NAME / "tests").exists()
    pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder))
    run(*pip, str(folder / NAME), cwd=folder)
    return folder / f"{NAME}-py3-none-any.whl"


def test_the_wheel_has_the_package_whole(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (fake.REPOSITORY / "ds_patches").rglob("*")
    written = {path for path in files if path.is_file() and path.suffix != ".pyc"}
    relative = {str(path.relative_to(fake.REPOSITORY)) for path in written}
    assert packed == relative | {"ds_patches/troubleshooting.md"}


def test_it_runs_beside_deepspeed_alone(wheel: Path, tmp_path: Path) -> None:
    """In an environment with the wheel, what that requires, and DeepSpeed; without torch."""
    run("-m", "venv", "--without-pip", str(tmp_path / "env"), cwd=tmp_path)
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site))
    run(*pip, str(wheel), cwd=tmp_path)
    required, found = Path(str(packaging.__file__)).parents[1], release.installed()
    assert found is not None
    parts = [*required.glob("wrapt*"), *required.glob("packaging*"), found.folder]
    for part in (*parts, *found.folder.parent.glob("deepspeed-*.dist-info")):
        (site / part.name).symlink_to(part)
    python = str(tmp_path / "env/bin/python")
    said = run("-m", "ds_patches", "doctor", cwd=tmp_path, python=python)
    (applies,) = [line.split(": ")[1] for line in said.splitlines() if "would apply: " in line]
    applied = [name for name, one in registry.patches().items() if gate.check(one).may_apply]
    assert applies.split(", ") == applied
    explain = ("-m", "ds_patches", "explain", "-v", "Cannot partition a param in flight")
    assert "A parameter is in flight at ZeRO-3" in run(*explain, cwd=tmp_path, python=python)
