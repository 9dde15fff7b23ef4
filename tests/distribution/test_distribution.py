"""The wheel and the sdist are built, and the wheel runs beside DeepSpeed alone."""

import json
import os
import shutil
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


def run(*arguments: str, cwd: Path, python: str = sys.executable, **variables: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
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
    docs = (fake.REPOSITORY / "docs").rglob("*")
    pages = {path.relative_to(fake.REPOSITORY) for path in docs if path.is_file()}
    beside = {"ds_patches.pth", "_ds_patches_hook.py", *(f"ds_patches/{path}" for path in pages)}
    moved = {f"ds_patches/startup/hook/{name}" for name in ("ds_patches.pth", "installed")}
    assert packed == relative - moved | beside
    with zipfile.ZipFile(wheel) as archive:
        hook = archive.read("ds_patches/startup/hook/sitecustomize.py")
        assert archive.read("_ds_patches_hook.py") == hook


def test_it_runs_beside_deepspeed_alone(wheel: Path, tmp_path: Path) -> None:
    """In an environment with the wheel, what that requires, and DeepSpeed; without torch."""
    run("-m", "venv", "--without-pip", str(tmp_path / "env"), cwd=tmp_path)
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site))
    run(*pip, str(wheel), cwd=tmp_path)
    required, installed = Path(str(packaging.__file__)).parents[1], release.installed()
    assert installed is not None
    parts = [*required.glob("wrapt*"), *required.glob("packaging*"), installed.folder]
    for part in (*parts, *installed.folder.parent.glob("deepspeed-*.dist-info")):
        (site / part.name).symlink_to(part)
    python = str(tmp_path / "env/bin/python")
    printed = json.loads(run("-m", "ds_patches", "doctor", "--json", cwd=tmp_path, python=python))
    applies = [name for name, answer in printed["patches"].items() if answer == "would apply"]
    default = {name: patch for name, patch in registry.patches().items() if patch.by_default}
    applied = [name for name, patch in default.items() if gate.check(patch).may_apply]
    assert applies == applied
    printed = run("-m", "ds_patches", "doctor", cwd=tmp_path, python=python, DS_PATCHES="all")
    assert f"hook: installed: {site}" in printed
    assert "this interpreter: armed" in printed
    page = run("-m", "ds_patches", "--help", cwd=tmp_path, python=python).split()[-1]
    assert Path(page).is_relative_to(site)
    assert "At ZeRO-3 a parameter is in flight" in Path(page).read_text("utf-8")


#: The states of all patches where DeepSpeed is imported first, and where `run` has them applied.
APPLY = "import ds_patches; print(*ds_patches.apply_all().items(), sep='\\n')"
APPLIED = "import deepspeed, ds_patches; print(*ds_patches.status().items(), sep='\\n')"


@pytest.mark.exhaustive
def test_it_runs_from_a_zip(tmp_path: Path) -> None:
    """The package is not the one of this environment, which is a folder of sources."""
    source = Path(ds_patches.__file__).parent
    shutil.copytree(source, tmp_path / "lib/ds_patches", ignore=shutil.ignore_patterns("__pyc*"))
    packed = shutil.make_archive(str(tmp_path / "lib"), "zip", tmp_path / "lib", "ds_patches")
    place, states = {"PYTHONPATH": packed}, run("-c", APPLY, cwd=fake.REPOSITORY)
    command = ("-m", "ds_patches")
    assert run(*command, "run", "--", "python", "-c", APPLIED, cwd=tmp_path, **place) == states
    assert run(*command, "prove", "outputs", "--script", cwd=tmp_path, **place).startswith('"""')


def test_a_package_without_patches_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(registry, "our_path", [str(tmp_path)])
    with pytest.raises(ds_patches.DsPatchesError, match=f"no patch in {tmp_path}"):
        ds_patches.apply_all()
