"""`record-shapes`: what it records is what the gate then knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.core import fake
from tests.core.test_declared import distribution

ENGINE = "deepspeed.runtime.engine:Engine"


def record(site: Path, releases: Path) -> tuple[int, str, str]:
    """Record the sample patch, which another package in `site` declares."""
    words = ("-m", "ds_patches", "record-shapes", "sample", "--releases", str(releases))
    done = fake.run("", site, arguments=words)
    return done.returncode, done.stdout, done.stderr


def releases(folder: Path, *versions: str) -> Path:
    for version in versions:
        fake.deepspeed(folder / version, version)
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return distribution(tmp_path / "site")


@pytest.fixture
def shapes(site: Path) -> Path:
    return site / "our_patches/sample/shapes.json"


def test_spans_and_drift(tmp_path: Path, site: Path, shapes: Path) -> None:
    folder = releases(tmp_path / "releases", "0.15.0", "0.16.0", "0.16.1", "0.18.0", "0.19.8")
    fake.deepspeed(folder / "0.17.0", "0.17.0", fake.edited(fake.ENGINE, "self.factor, x)", "x)"))
    (folder / "accelerate-1.7.0").mkdir()  # another package, for other tests
    shapes.unlink()
    code, printed, said = record(site, folder)
    assert (code, said) == (0, "")
    recorded = json.loads(shapes.read_text())
    forward = recorded[f"{ENGINE}.forward"]
    assert list(forward.values()) == ["0.16.0-0.16.1, 0.18.0-0.19.8", "0.17.0"]
    assert recorded[f"{ENGINE}.extra"] == {"absent": "0.16.0-0.19.8"}
    assert f"{ENGINE}.later" not in recorded
    assert [line[0] for line in printed.splitlines()] == ["+"] * 7
    assert record(site, folder) == (0, "no drift\n", "")
    shutil.rmtree(folder / "0.17.0")
    same, other = forward
    expected = [
        f"~ {ENGINE}.forward {same} (0.16.0-0.16.1, 0.18.0-0.19.8 -> 0.16.0-0.19.8)",
        f"- {ENGINE}.forward {other} (0.17.0)",
    ]
    assert sorted(record(site, folder)[1].splitlines()) == sorted(expected)


def test_a_folder_that_is_no_module_has_its_record(
    tmp_path: Path, site: Path, shapes: Path
) -> None:
    (shapes.parent / "__init__.py").unlink()
    shapes.unlink()
    assert record(site, releases(tmp_path / "releases", "0.16.0", "0.19.8"))[0] == 0
    assert shapes.is_file()


@pytest.mark.parametrize(
    ("supported", "missing"),
    [
        (">=0.17.0,<=0.19.0", ()),
        ("==0.19.0", ()),
        ("!=0.18.0,>=0.17.0,<=0.19.0", ()),
        (">=0.16.0,<=0.19.0", ("before 0.17.0",)),
        (">=0.17.0,<=0.19.8", ("after 0.19.0",)),
        (">=0.17.0", ("after 0.19.0",)),
        ("", ("before 0.17.0", "after 0.19.0")),
    ],
)
def test_what_is_claimed_and_not_there_is_said(
    tmp_path: Path, site: Path, shapes: Path, supported: str, missing: tuple[str, ...]
) -> None:
    binding = shapes.with_name("binding.py")
    fake.write(binding, fake.edited(binding.read_text(), ">=0.16.0,<=0.19.8", supported))
    folder = releases(tmp_path / "releases", "0.17.0", "0.19.0")
    code, _, said = record(site, folder)
    assert code == 0
    warning = f"warning: {folder} has no DeepSpeed in {supported}"
    assert said.splitlines() == [f"{warning} {one}" for one in missing]


def test_what_cannot_be_told_is_refused(tmp_path: Path, site: Path, shapes: Path) -> None:
    before = shapes.read_text()
    old, gone, both = (tmp_path / name for name in ("old", "gone", "both"))
    releases(old, "0.15.0")
    fake.deepspeed(gone / "any", "0.18.0", fake.edited(fake.ENGINE, "def norm", "def renamed"))
    shutil.copytree(
        releases(tmp_path / "other", "0.15.1") / "0.15.1/deepspeed-0.15.1.dist-info",
        releases(both, "0.18.0") / "0.18.0/deepspeed-0.15.1.dist-info",
    )
    for folder, expected, complaint in (
        (tmp_path / "nowhere", 2, "has no folder of a DeepSpeed in >=0.16.0,<=0.19.8"),
        (old, 2, "has no folder of a DeepSpeed in >=0.16.0,<=0.19.8"),
        (gone, 1, "Engine.norm does not exist in 0.18.0"),
        (both, 2, "has a folder with the metadata of two releases"),
    ):
        code, printed, said = record(site, folder)
        assert (code, printed) == (expected, "")
        assert complaint in said
        assert "Traceback" not in said
        assert shapes.read_text() == before


def test_a_name_that_no_patch_has_is_an_error(tmp_path: Path, site: Path) -> None:
    done = fake.run("", site, arguments=("-m", "ds_patches", "record-shapes", "smaple", "--rel=."))
    assert (done.returncode, done.stdout) == (2, "")
    assert "record-shapes: no patch is named 'smaple' (did you mean 'sample'?)" in done.stderr
