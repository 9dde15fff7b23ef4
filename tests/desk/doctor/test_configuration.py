"""`doctor --config`: of what a release gets wrong, what these settings can meet."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ds_patches.__main__ import main
from ds_patches.core.errors import FlagError
from ds_patches.desk import configuration, cured, doctor
from ds_patches.desk.defects import TOLD
from tests import shell
from tests.core import fake

MIDDLE = "micro steps in the middle are dropped"
LAST = "only the last micro step counts"
STEPS = "gradient_accumulation_steps"
SLOW = "a backward takes up to 2.5 times as long"
HARDLY = "the loss hardly falls; to 0.18.2 older gradients are added"
DOUBLED = "its gradients are divided by two"

#: Of LLaMA-Factory, axolotl and TRL: what decides in the files that they ship.
FACTORY = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "overlap_comm": False, "contiguous_gradients": True},
}
AXOLOTL = FACTORY | {
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "contiguous_gradients": True,
        "overlap_comm": True,
    }
}
TRL = """
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: 'bf16'
"""


def write(path: Path, content: dict[str, Any] | str) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def rows(config: Path, release: str) -> list[doctor.Row]:
    here = Version(release)
    facts = configuration.read(config)
    return [*doctor._rows(here, facts, cured.of_releases(here), armed=False)]


def met(config: Path, release: str) -> dict[str, tuple[str, ...]]:
    """Which defects show whatever the script does, with the open settings they depend on."""
    mine = (row for row in rows(config, release) if "script" not in row.depends)
    return {row.one.outcome: row.depends for row in mine if row.one.section}


def test_micro_steps_of_a_plain_configuration(tmp_path: Path) -> None:
    steps = {STEPS: 4, "gradient_clipping": 1.0}
    file = write(tmp_path / "ds.json", {"zero_optimization": {"stage": 2}} | steps)
    assert met(file, "0.17.6") == {LAST: ()}
    assert met(file, "0.18.4") == {}
    assert met(file, "0.18.6") == {SLOW: ()}
    write(file, {"zero_optimization": {"stage": 3}} | steps)
    assert met(file, "0.17.6") == {"NaN, or other numbers in each run": ()}
    write(file, {"zero_optimization": {"stage": 3, "overlap_comm": False}} | steps)
    assert met(file, "0.17.6") == {}


def test_other_spellings_of_a_setting(tmp_path: Path) -> None:
    """As DeepSpeed reads them."""
    sums = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    sums |= {"data_types": {"grad_accum_dtype": "fp32"}, "train_batch_size": 8}
    expected = met(write(tmp_path / "ds.json", sums), "0.18.4")
    assert "nothing trains" in expected
    for name in ("float32", "torch.float32", "float"):
        sums["data_types"] = {"grad_accum_dtype": name}
        assert met(write(tmp_path / "ds.json", sums), "0.18.4") == expected
    old = {"zero_optimization": {"stage": 2, "cpu_offload": True}, STEPS: 8}
    assert MIDDLE in met(write(tmp_path / "ds.json", old), "0.18.4")
    old["zero_optimization"] = {"stage": 2, "cpu_offload": "false"}
    assert MIDDLE not in met(write(tmp_path / "ds.json", old), "0.18.4")
    old["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": ""}}
    assert MIDDLE not in met(write(tmp_path / "ds.json", old), "0.18.4")
    half = {"zero_optimization": {"stage": 0}, "fp16": {"enabled": "false"}}
    assert met(write(tmp_path / "ds.json", half), "0.18.4") == {}


def test_a_boundary_may_be_set_by_hand(tmp_path: Path) -> None:
    """By Accelerate, where the file names no micro steps."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    file = write(tmp_path / "ds.json", {"zero_optimization": zero})
    assert MIDDLE not in met(file, "0.18.4")
    (row,) = [row for row in rows(file, "0.18.4") if row.one.outcome == MIDDLE]
    assert row.depends == ("script",)


def test_micro_steps_that_follow_from_the_batch_sizes_are_open(tmp_path: Path) -> None:
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1}
    file = write(tmp_path / "ds.json", {"zero_optimization": {"stage": 2}} | sizes)
    assert met(file, "0.17.6") == {LAST: (STEPS,)}


def test_what_a_file_of_llama_factory_leaves_open_is_open(tmp_path: Path) -> None:
    """JSON is known by its content."""
    file = write(tmp_path / "ds_z2.conf", FACTORY)
    assert met(file, "0.17.6") == {LAST: (STEPS,)}
    first = rows(file, "0.17.6")[0]
    assert (first.one.outcome, first.counts) == (LAST, True)
    write(file, FACTORY | {"zero_optimization": {"stage": 0}})
    assert met(file, "0.17.6") == {HARDLY: ("bf16",), DOUBLED: ("fp16",)}
    write(file, FACTORY | {"zero_optimization": {"stage": 0}, "bf16": "auto", "fp16": False})
    assert met(file, "0.17.6") == {HARDLY: ("bf16",)}


@pytest.mark.parametrize("around", ["llama_factory", "axolotl"])
def test_a_yaml_that_names_the_file(tmp_path: Path, around: str) -> None:
    """What the file calls "auto" is in the YAML."""
    write(tmp_path / "ds_z2.json", AXOLOTL)
    outer = tmp_path / f"{around}.yaml"
    outer.write_text("deepspeed: ds_z2.json\ngradient_accumulation_steps: 8\nbf16: true\n")
    streams = {"NaN, or other numbers in each run": ()}
    assert met(outer, "0.18.4") == {MIDDLE: (), **streams}
    assert met(outer, "0.17.6") == {LAST: (), MIDDLE: (), **streams}
    outer.write_text("deepspeed: ds_z2.json\ngradient_accumulation_steps: 1\n")
    assert met(outer, "0.17.6") == streams
    outer.write_text("deepspeed: ds_z0.json\nbf16: true\n")
    write(tmp_path / "ds_z0.json", FACTORY | {"zero_optimization": {"stage": 0}})
    assert met(outer, "0.17.6") == {HARDLY: ()}
    inline = f"deepspeed: {json.dumps(FACTORY)}\ngradient_accumulation_steps: 2\n"
    assert met(write(outer, inline), "0.17.6") == {LAST: ()}


def test_a_yaml_of_accelerate(tmp_path: Path) -> None:
    """What it leaves out is "auto", and what its `mixed_precision` says is on."""
    outer = write(tmp_path / "accelerate.yaml", TRL)
    assert met(outer, "0.17.6") == {LAST: (STEPS,)}
    assert met(outer, "0.19.8") == {}, "the trainer fills in the clipping"
    write(outer, TRL.replace("zero_stage: 2", "zero_stage: 0"))
    assert met(outer, "0.17.6") == {HARDLY: ()}
    write(outer, TRL.replace("zero_stage: 2", "zero_stage: 0").replace("'bf16'", "'no'"))
    assert met(outer, "0.17.6") == {HARDLY: ("bf16",), DOUBLED: ("fp16",)}
    given = "zero_stage: 2\n  gradient_accumulation_steps: 4\n"
    given = TRL.replace("zero_stage: 2\n", given).replace(
        "optimizer_device: none", "optimizer_device: cpu"
    )
    assert met(write(outer, given), "0.18.9") == {MIDDLE: ()}
    write(tmp_path / "z3.json", {"zero_optimization": {"stage": 3, "overlap_comm": False}})
    outer.write_text("deepspeed_config:\n  deepspeed_config_file: z3.json\n")
    (clipped,) = met(outer, "0.19.8")
    assert clipped.startswith("gradients are clipped to 1.0")


def test_a_default_that_has_changed_is_a_setting(tmp_path: Path) -> None:
    file = write(tmp_path / "ds.json", {"zero_optimization": {"stage": 1}, "elasticity": {}})
    found = [row.cure.by for row in rows(file, "0.19.8") if not row.depends]
    assert found == ["setting", "setting"]
    write(file, {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0})
    assert met(file, "0.19.8") == {}


def test_every_need_is_a_setting(tmp_path: Path) -> None:
    facts = configuration.read(write(tmp_path / "ds.json", FACTORY))
    assert {name for one in TOLD for name in one.needs.split()} <= {*facts}


def test_comments_and_last_commas_are_read(tmp_path: Path) -> None:
    """As DeepSpeed reads them, and people paste them; a text keeps what looks like one."""
    text = """{ // of a script
      "zero_optimization": {"stage": 2, /* "stage": 3, */},  # , }
      "comms": "http://x/*y, ]", "gradient_clipping": 1.0,
    }"""
    facts = configuration.read(write(tmp_path / "ds.json", text))
    assert (facts["stage"], facts["unclipped"]) == (2, False)
    odd = '{"zero_optimization": false, "bfloat16": {"enabled": true}}'
    facts = configuration.read(write(tmp_path / "ds.json", odd))
    assert (facts["stage"], facts["bf16"], facts["single"]) == (0, True, False)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "neither JSON nor YAML"),
        ("{}", "no DeepSpeed configuration"),
        ('{"deepspeed": "none.json"}', "ds.json names 'none.json', and there is no such file"),
        ("distributed_type: FSDP\nfsdp_config: {}\n", "its distributed_type is FSDP"),
        *(
            (f'{{"zero_optimization": {odd}}}', "no section")
            for odd in ("true", "[]", "null", '""')
        ),
        ('{"zero_optimization": {}, "optimizer": []}', "optimizer is no section"),
        ('{"zero_optimization": {"stage": 2.5}}', "no such ZeRO stage"),
        *(
            (f'{{"train_batch_size": 8, "bf16": {on}, "fp16": {on}}}', "bf16 and fp16 are both on")
            for on in ('{"enabled": true}', '{"enabled": "true"}')
        ),
    ],
)
def test_what_is_no_configuration_is_an_error(tmp_path: Path, content: str, why: str) -> None:
    with pytest.raises(FlagError, match=why):
        configuration.read(write(tmp_path / "ds.json", content))


DEEP = 9_000
LAUGHS = "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
MERGED = "a0: &a0 {b: 1}\n" + "".join(
    f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
ZERO = '{"zero_optimization": {"stage": %s}, "train_batch_size": 1}'
HOSTILE = {
    "aliases": f"{LAUGHS}zero_optimization: {{stage: *a8}}\n",
    "aliases in a setting": f"{LAUGHS}zero_optimization: {{stage: 2, overlap_comm: *a8}}\n",
    "aliases for a kind": f"{LAUGHS}distributed_type: *a8\n",
    "merged": f"{MERGED}zero_optimization: {{stage: 2}}\n",
    "infinite": ZERO % "1e999",
    "huge": ZERO % ("9" * 30_000),
    "huge in hexadecimal": f"zero_optimization: {{stage: 0x{'f' * 30_000}}}",
    "sexagesimal": f"zero_optimization: {{stage: 1{':1' * 15_000}}}",
    "no stage": ZERO % "7",
    "deep": ZERO % ("[" * DEEP + "]" * DEEP),
    "deep objects": '{"zero_optimization":' * 2_000,
    "deep YAML": "zero_optimization: " + "[" * DEEP,
    "dense YAML": "zero_optimization: {stage: [" + "a," * 15_000,
    "long": " " * 10**8,
    "binary": bytes(range(256)) * 100,
    "empty": "",
    "a list": "[1]",
    "a text": '"zero_optimization"',
    "another name": '{"deepspeed": "a\\u0000b"}',
    "a long name": json.dumps({"deepspeed": "a" * 300}),
    "keys": "1: 2\nnull: 3\nzero_optimization: x\n",
    **{
        f"{name} is {value}": json.dumps({"zero_optimization": {}, name: value})
        for name in ("zero_optimization", "scheduler", "checkpoint", "gradient_accumulation_steps")
        for value in ([1], "x", 1.5e300, {"params": [1], "stage": [], "enabled": {}})
        if isinstance(value, (list, str)) or name == "zero_optimization"
    },
}


#: What has a configuration all the same. Newer releases of PyYAML merge a key once.
READ = ("aliases in a setting", "merged")


@pytest.mark.parametrize("kind", [*HOSTILE, "folder", "pipe", "device"])
def test_a_hostile_file_is_told_of_at_once(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, content = tmp_path / "ds.json", HOSTILE.get(kind, "")
    if not shell.is_made_odd(file, kind):
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    begin = time.process_time()
    status = main(["doctor", "--release", "0.18.4", "--config", str(file)])
    assert time.process_time() - begin < 2
    said = capsys.readouterr()
    if kind not in READ:
        assert (status, said.out) == (2, "")
        assert said.err.startswith("ds_patches: ")
        assert len(said.err) < 1000


def test_what_is_odd_and_right_is_read(tmp_path: Path) -> None:
    """Anchors, a merged mapping, a pipe, and containers where a text is looked for."""
    text = "a: &a {stage: 2}\nzero_optimization:\n  <<: *a\noptimizer: {type: [1]}\n"
    assert configuration.read(write(tmp_path / "ds.yaml", text))["stage"] == 2
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    assert configuration.read(Path(f"/dev/fd/{reading}"))["stage"] == 2
    os.close(reading)


def test_the_exit_status_says_whether_something_is_left(tmp_path: Path) -> None:
    place = fake.Place(tmp_path, "sample")
    right = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
    file = write(tmp_path / "ds.json", right)
    ask = ("doctor", "--json", "--config", str(file))
    only = {"DS_PATCHES": "sample"}  # the others are not for this DeepSpeed
    sound = place.command(*ask, **only)
    assert sound.returncode == doctor.SOUND, sound.stdout + sound.stderr
    found = json.loads(sound.stdout)
    assert (found["status"], found["patches"]["sample"]) == (doctor.SOUND, "would apply")
    assert all(one["depends"] for one in found["rows"])
    write(file, {"zero_optimization": {"stage": 1}})
    wrong = place.command(*ask, **only)
    assert wrong.returncode == doctor.WRONG
    (one,) = [one for one in json.loads(wrong.stdout)["rows"] if not one["depends"]]
    assert (one["do"], one["state"]) == ('"gradient_clipping": 0.0', "setting")
    bad = place.command(*ask[:3], str(tmp_path / "none.json"))
    assert (bad.returncode, json.loads(bad.stdout)["status"]) == (2, 2)
    place.path = [fake.dependencies(tmp_path / "lib")]
    alone = place.command("doctor", bare=True)
    assert alone.returncode == doctor.UNKNOWN, "nobody can tell without DeepSpeed"
    assert place.command("doctor", "--release", "0.15.4", bare=True).returncode == doctor.UNKNOWN
    write(file, FACTORY)
    said = place.command("doctor", "--release", "0.17.6", "--config", str(file), bare=True)
    assert said.returncode == doctor.CURABLE, "what is not applied cures nothing"
    condition = "if gradient_accumulation_steps is above 1; "
    assert f"verdict: accumulation would cure 1, not applied, {condition}" in said.stdout
