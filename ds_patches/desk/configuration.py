"""A training's configuration, read for what decides which defects can show."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_patches.core.errors import FlagError
from ds_patches.desk import given
from ds_patches.desk.defects import SETTINGS, Defect

#: Whether something is so; where that is open, by which setting, or "script".
Facts = Mapping[str, bool | str | int]
Settings = Mapping[str, Any]

#: Every configuration of DeepSpeed has one of these, and Accelerate's words for it one of those.
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu")
_ITS = ("zero_optimization", *_BATCHES)
_WORDS = ("zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_init_flag")
#: Bytes of a file, and keys of a mapping that others are merged into.
_LONGEST, _KEYS = 1 << 16, 1000
_STEPS, _CLIPPING = "gradient_accumulation_steps", "gradient_clipping"
_HALVES = {"bf16": "fp16", "fp16": "bf16"}
SCRIPT = "script"
#: What stands for off.
_OFF = ("", "0", "0.0", "false", "f", "no", "n", "off", "none")
#: Older names of sections of `zero_optimization`, which are switches.
_OLDER = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*"?)|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*"?)|,(?=\s*[}\]])')


def read(file: Path) -> Facts:
    """Read DeepSpeed's JSON, or the YAML of Accelerate, LLaMA-Factory or axolotl around one.

    Raises FlagError for a file that is none of these.
    """
    outer = _load(file)
    if (kind := outer.get("distributed_type", "DEEPSPEED")) != "DEEPSPEED":
        its = kind if isinstance(kind, str) else type(kind).__name__
        raise FlagError(f"{file} has no DeepSpeed configuration: its distributed_type is {its}")
    inner = outer.get("deepspeed_config", outer.get("deepspeed", outer))
    if isinstance(inner, Mapping):
        inner = inner.get("deepspeed_config_file", inner)
    if isinstance(inner, str):
        beside = (file.parent / inner, Path(inner), file.parent / Path(inner).name)
        named = next(filter(os.path.exists, beside), None)
        if named is None:
            raise FlagError(f"{file} names {inner!r}, and there is no such file")
        inner = _load(named)
    if not isinstance(inner, Mapping) or not any(name in inner for name in (*_ITS, *_WORDS)):
        raise FlagError(f"{file} has no DeepSpeed configuration")
    try:
        return _facts(inner, outer if inner is not outer else None)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise FlagError(f"{file} has a setting of a wrong type: {error}") from error


def conditions(one: Defect, facts: Facts) -> tuple[str, ...] | None:
    """Return on which open settings a row depends, and on the script; None if it cannot show."""
    if facts.get("stage") not in (None, *one.stages):
        return None
    found = [facts.get(name, SCRIPT) for name in one.needs.split()]
    return (
        None
        if False in found
        else tuple(dict.fromkeys(one for one in found if isinstance(one, str)))
    )


def said(setting: str) -> str:
    """Return in words what it takes of an open setting."""
    if setting == SCRIPT:
        return "your script does this"
    return f"{setting} is above 1" if setting == _STEPS else f"{setting} is on"


def _facts(inner: Settings, outer: Settings | None) -> Facts:
    """inner: DeepSpeed's, or Accelerate's words for it.

    outer: the file around it, which fills in what is "auto"; what Accelerate's words lack, is.
    """
    if inner.get("zero_optimization") is False:
        inner = {**inner, "zero_optimization": {}}
    if "bfloat16" in inner:  # its older name
        inner = {"bf16": inner["bfloat16"], **inner}
    for name in ("zero_optimization", "optimizer", "scheduler", "checkpoint"):
        if not isinstance(inner.get(name, {}), Mapping):
            raise TypeError(f"{name} is no section")
    zero: Settings = inner.get("zero_optimization", {})
    older = [new for old, new in _OLDER.items() if _switch(zero.get(old), old)]
    if older:
        zero = {new: {"device": "cpu"} for new in older} | dict(zero)
        inner = {**inner, "zero_optimization": zero}
    words = "zero_optimization" not in inner and any(name in inner for name in _WORDS)
    stage = float(zero.get("stage", inner.get("zero_stage", 2 if words else 0)))
    if stage not in range(4):
        raise ValueError("there is no such ZeRO stage")
    stage = int(stage)
    schedule: Settings = inner.get("scheduler", {})
    halves = {name: _half(name, inner, outer) for name in _HALVES}
    if [*halves.values()] == [True, True]:
        raise ValueError("bf16 and fp16 are both on")
    half = next((one for one in (True in halves.values(), *halves.values()) if one), False)
    facts = settings({**(outer or {}), **inner})  # a trainer's `optim`, too
    return facts | halves | {
        "stage": stage,
        "overlap": _switch(zero.get("overlap_comm", stage == 3), "overlap_comm"),
        "accumulation": _accumulates(inner, outer or {}, words),
        "unclipped": inner.get(_CLIPPING) is None and not words,
        "sums": facts["sums"] and halves["bf16"],
        "bf16_or_fp16": half,
        "single": SCRIPT if isinstance(half, str) else not half,
        "pipeline": "pipeline" in inner or SCRIPT,
        # Without a schedule in the configuration the script has one, or none.
        "warmup": "warmup_max_lr" not in schedule.get("params", {}) and facts["warmup"]
                  if schedule else SCRIPT,
        "cosine": facts["cosine"] if schedule else SCRIPT,
        "universal": bool(inner.get("checkpoint", {}).get("load_universal")),
        SCRIPT: SCRIPT,
    }  # fmt: skip


def settings(config: Settings) -> dict[str, bool | str | int]:
    """Return what a configuration of DeepSpeed says of the table's settings; "auto" is open."""
    found: dict[str, bool | str | int] = {}
    for name, places in SETTINGS.items():
        each = [_is_on(config, *place.split("=", 1)) for place in places]
        found[name] = True in each or (SCRIPT if None in each else False)
    return found


def _is_on(config: Any, place: str, pattern: str = "") -> bool | None:
    for name in place.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    # Of a YAML with aliases the text of a container may be longer than any memory.
    value = "..." if isinstance(config, (Mapping, list)) else str(config).lower()
    if value == "auto":
        return None
    return bool(re.fullmatch(pattern, value)) if pattern else value not in _OFF


def _accumulates(inner: Settings, outer: Settings, words: bool) -> bool | str:
    follows = all(isinstance(inner.get(name), int) for name in _BATCHES)
    value = inner.get(_STEPS, "auto" if words or follows else 1)
    value = outer.get(_STEPS, value) if value == "auto" else value
    return _STEPS if value == "auto" else int(value) > 1


def _half(name: str, inner: Settings, outer: Settings | None) -> bool | str:
    """A framework may switch it on where DeepSpeed's file has no section for it, too."""
    section = inner.get(name, {"enabled": False} if outer is None else "auto")
    value = section.get("enabled", False) if isinstance(section, Mapping) else section
    if value == "auto" and outer:
        chosen = outer.get("mixed_precision")
        if chosen in _HALVES or outer.get(_HALVES[name]) is True:
            value = chosen == name
        else:
            value = outer.get(name, "auto")
    return _switch(value, name)


def _switch(value: Any, name: str) -> bool | str:
    if isinstance(value, str):
        return name if value == "auto" else value.lower() not in _OFF
    return bool(value)


def _yaml(file: Path, text: str) -> Any:
    try:
        import yaml

        class Loader(yaml.SafeLoader):  # type: ignore[misc]
            def flatten_mapping(self, node: Any) -> None:
                """Merge mappings into one, which may be named, and merged again, and grow so."""
                super().flatten_mapping(node)
                if len(node.value) > _KEYS:
                    raise ValueError(f"a mapping of more than {_KEYS} keys")

        return yaml.load(text, Loader)
    except Exception as error:  # also where PyYAML is not installed, or raises one of its own
        raise FlagError(f"{file} is neither JSON nor YAML: {error}") from error


def _uncommented(text: str) -> str:
    """Return JSON without comments and last commas, which DeepSpeed reads, too."""
    for extra in (_COMMENT, _LAST_COMMA):
        text = extra.sub(r"\1", text)
    return text


def _load(file: Path) -> Settings:
    """Read JSON, or else YAML, whatever the file is called."""
    read = given.content(file, _LONGEST + 1)
    if len(read) > _LONGEST:
        raise FlagError(f"{file} has more than {_LONGEST} bytes: no DeepSpeed configuration")
    try:
        text = read.decode()
        found = json.loads(_uncommented(text))
    except UnicodeDecodeError as error:
        raise FlagError(f"{file} cannot be read: {error}") from error
    except ValueError:
        found = _yaml(file, text)
    except RecursionError as error:
        raise FlagError(f"{file} is nested too deeply") from error
    if not isinstance(found, Mapping):
        raise FlagError(f"{file} has no DeepSpeed configuration")
    return found
