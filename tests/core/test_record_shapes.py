"""`tools/record_shapes.py`: what it records is what the gate then knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.core import fake

TOOL = fake.REPOSITORY / "tools/record_shapes.py"


def record(folder: Path, releases: Path) -> tuple[int, str, str]:
    arguments = ["record_shapes", "sample", "--releases", str(releases)]
    code = fake.with_patches(folder) + (
        f"import runpy, sys; sys.argv = {arguments}\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')"
    )
    done = fake.run(code)
    return done.returncode, done.stdout, done.stderr


def test_spans_and_drift(tmp_path: Path) -> None:
    other = fake.edited(fake.ENGINE, "self.factor, x)", "x)")
    for version in ("0.15.0", "0.16.0", "0.16.1", "0.17.0", "0.18.0", "0.18.1"):
        engine = other if version == "0.17.0" else fake.ENGINE
        fake.deepspeed(tmp_path / "releases" / version, version, engine)
    (tmp_path / "releases/accelerate-1.7.0").mkdir()  # another package, for other tests
    folder = fake.patch_folder(tmp_path / "patches")
    code, printed, _ = record(folder, tmp_path / "releases")
    assert code == 0
    shapes = json.loads((folder / "sample/shapes.json").read_text())
    forward = shapes["deepspeed.runtime.engine:Engine.forward"]
    assert sorted(forward.values()) == ["0.16.0-0.16.1, 0.18.0-0.18.1", "0.17.0"]
    assert shapes["deepspeed.runtime.engine:Engine.extra"] == {"absent": "0.16.0-0.18.1"}
    assert "deepspeed.runtime.engine:Engine.later" not in shapes
    assert "+ deepspeed.runtime.engine:Engine.forward" in printed
    assert record(folder, tmp_path / "releases")[1] == "no drift\n"
    shutil.rmtree(tmp_path / "releases/0.17.0")
    assert "- deepspeed.runtime.engine:Engine.forward" in record(folder, tmp_path / "releases")[1]


def test_a_claimed_place_that_is_missing_is_refused(tmp_path: Path) -> None:
    gone = fake.edited(fake.ENGINE, "def norm", "def renamed")
    fake.deepspeed(tmp_path / "releases/0.18.0", "0.18.0", gone)
    folder = fake.patch_folder(tmp_path / "patches")
    before = (folder / "sample/shapes.json").read_text()
    code, _, complaint = record(folder, tmp_path / "releases")
    assert code == 1
    assert "Engine.norm does not exist in 0.18.0" in complaint
    assert (folder / "sample/shapes.json").read_text() == before
