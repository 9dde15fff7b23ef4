"""A training's configuration, read for what decides which symptoms can show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_patches.core.errors import FlagError
from ds_patches.symptoms import Symptom

#: What a setting is; None where the file leaves it open.
Facts = Mapping[str, bool | int | None]

#: Sections that DeepSpeed refuses from 0.19.7 on, and from 0.19.8 on; those of zero_optimization.
FIRST = ("nebula", "compression_training", "quantize_training", "sparse_attention",
         "mics_shard_size", "mics_hierarchical_params_gather")  # fmt: skip
REMOVED = ("amp", "sparse_gradients", "eigenvalue", "elasticity", "graph_harvesting",
           "curriculum_learning", "progressive_layer_drop", "zeropp_loco_param")  # fmt: skip


def read(file: Path) -> Facts:
    """Read DeepSpeed's JSON, or the YAML of Accelerate, LLaMA-Factory or axolotl around one.

    Raises FlagError for a file that is none of these.
    """
    outer = _load(file)
    inner = outer.get("deepspeed_config", outer.get("deepspeed", outer))
    if isinstance(inner, Mapping):
        inner = inner.get("deepspeed_config_file", inner)
    if isinstance(inner, str):
        beside = (file.parent / inner, Path(inner), file.parent / Path(inner).name)
        inner = _load(next((one for one in beside if one.is_file()), Path(inner)))
    if not isinstance(inner, Mapping):
        raise FlagError(f"{file} has no configuration of DeepSpeed")
    return _facts(inner, outer if inner is not outer else {})


def _facts(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> Facts:
    """inner: DeepSpeed's, or Accelerate's words for it; outer: what fills in its "auto"."""
    zero = inner.get("zero_optimization", {})
    stage = zero.get("stage", inner.get("zero_stage", 0))
    offload = zero.get("offload_optimizer") or {"device": inner.get("offload_optimizer_device")}
    steps = _filled(inner, outer, "gradient_accumulation_steps", 1)
    clipping = _filled(inner, outer, "gradient_clipping", None, "max_grad_norm")
    half = inner.get("bf16", {}).get("enabled", False)
    half = outer.get("bf16", outer.get("mixed_precision") == "bf16") if half == "auto" else half
    return {
        "stage": stage if isinstance(stage, int) else None,
        "offload": offload.get("device") not in (None, "none"),
        "overlap": _switch(zero.get("overlap_comm", stage == 3)),
        "accumulation": None if steps == "auto" else int(steps) > 1,
        "unclipped": clipping is None,
        "bf16": _switch(half),
        "sums": bool(half) and inner.get("data_types", {}).get("grad_accum_dtype") == "fp32",
        "scattered": not zero.get("contiguous_gradients", True),
        "deepcompile": bool(inner.get("compile", {}).get("deepcompile")),
        "pipeline": "pipeline" in inner or None,
        "first": any(name in inner or name in zero for name in FIRST),
        "removed": any(name in inner or name in zero for name in REMOVED),
        "script": None,
    }


def applies(one: Symptom, facts: Facts) -> bool | None:
    """Whether a row shows with these settings; None if the script has a say in it."""
    if facts.get("stage") not in (None, *one.stages):
        return False
    found = [facts.get(name) for name in one.needs.split()]
    return False if False in found else None if None in found else True


def _filled(
    inner: Mapping[str, Any], outer: Mapping[str, Any], name: str, default: Any, other: str = ""
) -> Any:
    """Return a value; where it is "auto", what the file around it has, by this name or other."""
    value = inner.get(name, default)
    return outer.get(name, outer.get(other, value)) if value == "auto" else value


def _switch(value: Any) -> bool | None:
    return None if value == "auto" else bool(value)


def _load(file: Path) -> Mapping[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            found = json.loads(text)
        else:
            import yaml

            found = yaml.safe_load(text)
    except Exception as error:  # also where PyYAML is not installed, or raises one of its own
        raise FlagError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, Mapping):
        raise FlagError(f"{file} has no configuration of DeepSpeed")
    return found
