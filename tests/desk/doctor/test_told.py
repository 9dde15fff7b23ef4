"""What is told: each defect that settings decide, and settings that frameworks ship."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ds_patches.__main__ import main
from ds_patches.desk.defects import DEFECTS, SETTINGS, Defect, plain
from ds_patches.desk.doctor import CURABLE, WRONG

ZERO, OFFLOAD = "zero_optimization", {"device": "cpu", "pin_memory": True}
#: What switches a setting of the table on, where that is more than `true` at its place.
ON: dict[str, Any] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "autotp": {"tensor_parallel": {"autotp_size": 2}},
    "clipping": {"gradient_clipping": 1.0},
    "communication_data_type": {"communication_data_type": "fp32"},
    "cosine": {"scheduler": {"type": "WarmupCosineLR"}},
    "first": {"nebula": {"enabled": False}},
    "fp16_autocast": {"torch_autocast": {"dtype": "float16"}},
    "bf16_or_fp16": {"bf16": {"enabled": True}},
    "hpz": {ZERO: {"zero_hpz_partition_size": 2}},
    "muon": {"optimizer": {"type": "Muon"}},
    "nvme": {ZERO: {"offload_optimizer": {"device": "nvme"}}},
    "offload": {ZERO: {"offload_optimizer": {"device": "cpu"}}},
    "offload_param": {ZERO: {"offload_param": {"device": "cpu"}}},
    "onebit": {"optimizer": {"type": "OneBitAdam"}},
    "onecycle": {"scheduler": {"type": "OneCycle"}},
    "per_tensor": {"optimizer": {"type": "Adafactor"}},
    "pipeline": {"pipeline": {}},
    "removed": {"sparse_gradients": False},
    "scattered": {ZERO: {"contiguous_gradients": False}},
    "single": {},
    "static_scale": {"fp16": {"loss_scale": 128}},
    "sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "no_overflow_check": {},
    "unclipped": {"gradient_clipping": None},
    "no_pin_memory": {},
    "universal": {"checkpoint": {"load_universal": True}},
    "warmup": {"scheduler": {"type": "WarmupLR"}},
}
DECIDED = [one for one in DEFECTS if {*one.needs.split()} <= {*SETTINGS, *ON}]


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = {name for name in first if isinstance(first[name], dict) and name in second}
    return {**first, **second, **{name: merged(first[name], second[name]) for name in both}}


def minimal(one: Defect) -> dict[str, Any]:
    """A configuration with what brings a defect about, and nothing else."""
    config: dict[str, Any] = {ZERO: {"stage": one.stages[-1], "overlap_comm": False}}
    config["gradient_clipping"] = 0.0
    for name in one.needs.split():
        turned: Any = True
        for key in reversed(SETTINGS.get(name, [""])[0].split(".")):
            turned = {key: turned}
        config = merged(config, ON.get(name, turned))
    return config


def ask(config: Mapping[str, Any], release: str, file: Path) -> int:
    file.write_text(json.dumps(config), encoding="utf-8")
    return main(["doctor", "--release", release, "--config", str(file)])


@pytest.mark.parametrize("one", DECIDED, ids=lambda one: f"{one.first} {one.outcome[:40]}")
def test_what_settings_decide_is_in_the_verdict(
    one: Defect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = ask(minimal(one), one.first, tmp_path / "ds.json")
    verdict, _, said = capsys.readouterr().out.partition("\n")
    decided = said.partition(", if ")[0]
    assert f"{plain(one.outcome)}" in decided, said
    assert status == WRONG or (status == CURABLE and one.patch)
    assert ("no patch cures" in verdict) == (status == WRONG), verdict
    if not one.patch:
        assert decided.index(plain(one.outcome)) < (decided + ", would cure").index("would cure")


def shipped(stage: int, **more: Any) -> dict[str, Any]:
    """What the files of trainers that fill in "auto" have in common."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    halves = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0}}
    config = {**dict.fromkeys((*names, "gradient_clipping"), "auto"), **halves}
    return merged({**config, ZERO: {"stage": stage, "contiguous_gradients": True}}, more)


UNTESTED = {"zero_allow_untested_optimizer": True}
QUIET, OVERLAP = {"overlap_comm": False}, {"overlap_comm": True}
ALL_OFF = {"offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}
BF16 = {"bf16": {"enabled": True}, "fp16": {"enabled": False}}
SHIPPED = {
    **{f"LLaMA-Factory {n}": shipped(n, **UNTESTED, zero_optimization=QUIET) for n in (0, 2, 3)},
    "LLaMA-Factory 2 offload": shipped(
        2, **UNTESTED, zero_optimization=QUIET | {"offload_optimizer": OFFLOAD}
    ),
    "LLaMA-Factory 3 offload": shipped(3, **UNTESTED, zero_optimization=QUIET | ALL_OFF),
    "axolotl 1": shipped(1, zero_optimization=OVERLAP),
    "axolotl 2": shipped(
        2, zero_optimization=OVERLAP | {"offload_optimizer": {"device": "cpu"}}, compile={}
    ),
    "axolotl 3 offload": shipped(3, **BF16, **UNTESTED, zero_optimization=OVERLAP | ALL_OFF),
    **{
        f"TRL {n}": {
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "bf16",
            "deepspeed_config": {"zero_stage": n, "offload_optimizer_device": "none"},
        }
        for n in (1, 2, 3)
    },
    "ms-swift 0 AutoTP": shipped(0, zero_optimization=QUIET, tensor_parallel={"autotp_size": 1}),
    "ms-swift 3 offload": shipped(3, zero_optimization=OVERLAP | ALL_OFF),
    **{
        f"OpenRLHF {n}": {
            **BF16,
            "gradient_clipping": 1.0,
            "data_types": {"grad_accum_dtype": None},
            "compile": {"deepcompile": False},
            "tensor_parallel": {"autotp_size": 1},
            "checkpoint": {"load_universal": False},
            ZERO: {"stage": n, "zero_hpz_partition_size": 8, "offload_optimizer": OFFLOAD},
        }
        for n in (2, 3)
    },
    "verl 2": {
        **BF16,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        ZERO: {"stage": 2, "offload_optimizer": OFFLOAD, "overlap_comm": True},
    },
    "DeepSpeed-Chat 3": {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "fp16": {"enabled": True, "loss_scale_window": 100},
        "gradient_clipping": 1.0,
        ZERO: {"stage": 3, **OVERLAP, **ALL_OFF, "zero_hpz_partition_size": 8},
    },
    "DeepSpeedExamples ZenFlow": {
        **BF16,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
        ZERO: {"stage": 2, "offload_optimizer": OFFLOAD, "zenflow": {"topk_ratio": 0.1}},
    },
    "DeepSpeedExamples AutoTP": shipped(
        2,
        tensor_parallel={"autotp_size": 4},
        scheduler={"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto"}},
    ),
}


@pytest.mark.parametrize("release", ["0.16.9", "0.17.6", "0.18.4", "0.19.8"])
@pytest.mark.parametrize("name", SHIPPED)
def test_what_frameworks_ship_is_answered_on_a_screen(
    name: str, release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is off is no alarm, and what settings decide waits for no option."""
    ask(SHIPPED[name], release, tmp_path / "ds.json")
    said = capsys.readouterr().out
    assert said.count("\n") <= 25, said
    main(["doctor", "--json", "--release", release, "--config", str(tmp_path / "ds.json")])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert not [
        row for row in rows if "script" not in row["depends"] and row["outcome"] not in said
    ]
    autotp = [row for row in rows if "autotp" in row["row"].lower()]
    assert bool(autotp) <= ("Examples AutoTP" in name), "a size of 1 is off"
    assert "WarmupLR" not in said
