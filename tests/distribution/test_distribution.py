"""The wheel and the sdist: built with what is here, and installed beside DeepSpeed alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import packaging
import pytest

import ds_patches
from ds_patches.core import registry, release
from tests.core import fake
from tests.docs.test_docs import files_on

NAME = f"ds_patches-{ds_patches.__version__}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both; the sdist is built first, and the wheel out of it."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), cwd=fake.REPOSITORY)
    sdist = folder / f"{NAME}.tar.gz"
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder))
    run(*pip, str(folder / NAME), cwd=folder)
    return folder


def run(*arguments: str, cwd: Path, python: str = sys.executable) -> str:
    clean = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith("DS_PATCHES")
    }
    done = subprocess.run([python, *arguments], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_package_whole(built: Path) -> None:
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = fake.REPOSITORY / "ds_patches"
    written = {
        str(path.relative_to(fake.REPOSITORY))
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert packed == written | {"ds_patches/troubleshooting.md"}


def test_the_sdist_has_what_a_wheel_is_built_of_and_no_tests(built: Path) -> None:
    """Tests that cannot run where they lie are none."""
    folder = built / NAME
    for path in ("docs/troubleshooting.md", "README.md", "LICENSE", "CHANGELOG.md"):
        assert (folder / path).is_file(), path
    assert not (folder / "tests").exists()
    assert not [*folder.rglob("__pycache__")]


def test_the_metadata_names_licence_and_authors(built: Path) -> None:
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        said = wheel.read(f"{NAME}.dist-info/METADATA").decode()
        licence = wheel.read(f"{NAME}.dist-info/licenses/LICENSE").decode()
    for line in ("License-Expression: Apache-2.0", "Author: ds_patches contributors"):
        assert line in said.splitlines()
    assert "Project-URL" not in said, "there is no public address"
    assert "Copyright 2026 ds_patches contributors" in licence


def environment(folder: Path, built: Path) -> tuple[str, Path]:
    """Make one that has the wheel and what it requires; return its Python and site-packages."""
    run("-m", "venv", "--without-pip", str(folder), cwd=built)
    (site,) = (folder / "lib").glob("python*/site-packages")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site))
    run(*pip, str(built / f"{NAME}-py3-none-any.whl"), cwd=built)
    here = Path(str(packaging.__file__)).parents[1]
    link(site, *here.glob("wrapt*"), *here.glob("packaging*"))
    return str(folder / "bin/python"), site


def link(site: Path, *parts: Path) -> None:
    for part in parts:
        (site / part.name).symlink_to(part)


def link_deepspeed(site: Path) -> None:
    package = release.installed().folder
    link(site, package, *package.parent.glob("deepspeed-*.dist-info"))


def test_doctor_runs_beside_deepspeed_alone(built: Path, tmp_path: Path) -> None:
    """A bare environment: its own Python, the wheel, what that requires, and DeepSpeed."""
    python, site = environment(tmp_path / "env", built)
    link_deepspeed(site)
    assert find_spec("torch"), "which the environment below has not"
    said = run("-m", "ds_patches", "doctor", cwd=tmp_path, python=python)
    assert "torch       not installed" in said
    told = run("-m", "ds_patches", "explain", "mat2 must be a matrix", cwd=tmp_path, python=python)
    assert f"{site}/ds_patches/troubleshooting.md#gradient-penalty" in told
    assert f"what DeepSpeed {release.installed().version} gets wrong" in said
    for name in registry.patches():
        assert re.search(f"^  {name} +would apply$", said, re.MULTILINE)


def test_a_patch_of_another_package_is_written_by_its_page(built: Path, tmp_path: Path) -> None:
    """With the page's files, command and test, and nothing of this project but the wheel."""
    python, site = environment(tmp_path / "env", built)
    folders = (Path(one) for one in sys.path)
    others = [str(one) for one in folders if not (one / "ds_patches/__init__.py").is_file()]
    (site / "others.pth").write_text("\n".join(others))
    own = tmp_path / "own"
    for path, text in files_on("writing-a-patch.md").items():
        fake.write(own / path, text)
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--editable", str(own), cwd=own, python=python)

    installed = release.installed()
    (own / ".releases").mkdir()
    (own / ".releases" / str(installed.version)).symlink_to(installed.folder.parent)
    record = ("-m", "ds_patches", "record-shapes", "loud_scale", "--releases", ".releases")
    recorded = run(*record, cwd=own, python=python)
    assert "+ deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler.update_scale" in recorded
    doctor = run("-m", "ds_patches", "doctor", cwd=tmp_path, python=python)
    assert re.search("^  loud_scale +would apply$", doctor, re.MULTILINE)
    status = run("-m", "ds_patches", "status", "loud_scale", cwd=tmp_path, python=python)
    assert all(len(line.split(maxsplit=1)) == 2 for line in status.splitlines())
    tested = run("-m", "pytest", "-p", "no:cacheprovider", "tests", cwd=own, python=python)
    assert "3 passed" in tested
    run("-m", "pip", "wheel", *pip[3:], "-w", str(tmp_path), str(own), cwd=own, python=python)
    with zipfile.ZipFile(tmp_path / "our_patches-1.0-py3-none-any.whl") as wheel:
        assert "our_patches/loud_scale/shapes.json" in wheel.namelist()
