"""`doctor --config`: of what a release gets wrong, what these settings can meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ds_patches.commands import configuration, doctor, symptoms
from ds_patches.core.errors import FlagError
from ds_patches.symptoms import SYMPTOMS
from tests.core import fake

AUTO = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
MIDDLE = "micro steps in the middle are dropped"
LAST = "only the last micro step counts"


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def decided(config: Path, release: str, cures: bool = True) -> dict[str, str]:
    """What shows with these settings whatever the script does, with what helps."""
    here = Version(release)
    answers = symptoms.of_releases(here) if cures else {}
    rows = [*doctor._rows(here, configuration.read(config), answers)]
    return {one["outcome"]: one["cure"] for one in rows if one["applies"]}


def test_micro_steps_of_a_plain_configuration(tmp_path: Path) -> None:
    steps = {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    file = write(tmp_path / "ds.json", {"zero_optimization": {"stage": 2}} | steps)
    assert decided(file, "0.17.6") == {LAST: "patch"}
    assert decided(file, "0.18.4") == {}
    assert decided(file, "0.18.6") == {
        "a backward takes up to 2.5 times as long": "patch",
    }
    write(file, {"zero_optimization": {"stage": 3}} | steps)
    assert decided(file, "0.17.6") == {"NaN, or other numbers in each run": "patch"}
    write(file, {"zero_optimization": {"stage": 3, "overlap_comm": False}} | steps)
    assert decided(file, "0.17.6") == {}


@pytest.mark.parametrize("around", ["llama_factory", "axolotl"])
def test_a_yaml_that_names_the_file(tmp_path: Path, around: str) -> None:
    """What the file calls "auto" is in the YAML."""
    write(tmp_path / "ds_z2.json", AUTO)
    outer = tmp_path / f"{around}.yaml"
    outer.write_text("deepspeed: ds_z2.json\ngradient_accumulation_steps: 8\nbf16: true\n")
    assert decided(outer, "0.18.4") == {MIDDLE: "patch"}
    assert decided(outer, "0.17.6") == {LAST: "patch", MIDDLE: "patch"}
    outer.write_text("deepspeed: ds_z2.json\ngradient_accumulation_steps: 1\n")
    assert decided(outer, "0.17.6") == {}
    facts = configuration.read(tmp_path / "ds_z2.json")
    assert facts["accumulation"] is None, "which the file alone does not say"


def test_a_yaml_of_accelerate(tmp_path: Path) -> None:
    outer = tmp_path / "accelerate.yaml"
    outer.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\n"
        "deepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 4\n"
        "  offload_optimizer_device: cpu\n  gradient_clipping: 1.0\n"
    )
    assert decided(outer, "0.18.9") == {MIDDLE: "patch"}
    write(tmp_path / "z3.json", {"zero_optimization": {"stage": 3, "overlap_comm": False}})
    outer.write_text("deepspeed_config:\n  deepspeed_config_file: z3.json\n")
    (clipped,) = decided(outer, "0.19.8")
    assert clipped.startswith("gradients are clipped to 1.0")


def test_a_default_that_has_changed_is_a_setting(tmp_path: Path) -> None:
    file = write(tmp_path / "ds.json", {"zero_optimization": {"stage": 1}, "elasticity": {}})
    assert sorted(decided(file, "0.19.8").values()) == ["setting", "setting"]
    write(file, {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0})
    assert decided(file, "0.19.8") == {}


def test_every_need_is_a_setting(tmp_path: Path) -> None:
    facts = configuration.read(write(tmp_path / "ds.json", {}))
    assert {name for one in SYMPTOMS for name in one.needs.split()} <= {*facts}


@pytest.mark.parametrize("content", ["{", "[]", '"ds.json"', '{"deepspeed": "none.json"}'])
def test_what_is_no_configuration_is_an_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(FlagError, match=r"json (has no configuration|cannot be read)"):
        configuration.read(file)


def test_the_exit_status_says_whether_something_is_left(tmp_path: Path) -> None:
    place = fake.Place(tmp_path, "sample")
    right = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
    file = write(tmp_path / "ds.json", right)
    ask = ("doctor", "--json", "--config", str(file))
    only = {"DS_PATCHES": "sample"}  # the others are not for this DeepSpeed
    sound = place.command(*ask, **only)
    assert sound.returncode == 0, sound.stdout + sound.stderr
    found = json.loads(sound.stdout)
    assert found["status"] == 0
    assert found["environment"]["deepspeed"] == "0.19.8"
    assert found["patches"]["sample"] == "would apply"
    assert not [one for one in found["wrong"] if one["applies"]]

    write(file, {"zero_optimization": {"stage": 1}})
    wrong = place.command(*ask, **only)
    assert wrong.returncode == 1
    (one,) = [one for one in json.loads(wrong.stdout)["wrong"] if one["applies"]]
    assert one["do"] == '"gradient_clipping": 0.0'

    place.path = [fake.dependencies(tmp_path / "lib")]
    assert place.command("doctor", bare=True).returncode == 2, "nobody can tell without DeepSpeed"
