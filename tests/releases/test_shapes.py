"""`make shapes`: what it records is what the gate then knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ds_patches.core import registry, shape
from tests.core import fake
from tests.releases import shapes


def test_spans_drift_and_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(engines: dict[str, str]) -> int:
        return shapes.record(
            {
                Version(one): fake.deepspeed(tmp_path / one, engine=engine) / "deepspeed"
                for one, engine in engines.items()
            }
        )

    binding: dict[str, Any] = {}
    exec(fake.BINDING, binding)
    monkeypatch.setattr(registry, "patches", lambda: {"sample": binding["PATCH"]})
    file = fake.write(tmp_path / "shapes.json", '{"releases": "", "files": {}, "places": {}}')
    monkeypatch.setattr(shape, "RECORD", file)

    engines = dict.fromkeys(("0.15.0", "0.16.0", "0.16.1", "0.17.0", "0.19.8"), fake.ENGINE)
    changed = fake.edited(fake.ENGINE, "self.factor, x)", "x)")
    assert record(engines | {"0.17.0": changed}) == 0
    found = json.loads(file.read_text())
    assert found["releases"] == " ".join(engines)
    assert [*found["files"][fake.MODULE].values()] == ["0.16.0-0.16.1, 0.19.8", "0.17.0"]
    places = found["places"][fake.MODULE]
    assert {*places} == {*fake.PLACES}
    assert places["Engine.extra"] == {"absent": "0.16.0-0.19.8"}
    assert [*places["Engine.forward"].values()] == ["0.16.0-0.16.1, 0.19.8", "0.17.0"]
    capsys.readouterr()
    assert record(engines) == 0
    assert "~ deepspeed.runtime.engine:Engine.forward" in capsys.readouterr().out

    before = file.read_text()
    gone = fake.edited(fake.ENGINE, "def norm", "def renamed")
    assert record({"0.16.0": fake.ENGINE, "0.18.0": gone}) == 1
    assert capsys.readouterr().out.strip().endswith("Engine.norm does not exist in 0.18.0")
    assert file.read_text() == before
