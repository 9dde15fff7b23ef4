"""A training's configuration, read for what decides which defects can show."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ds_patches.core.errors import FlagError
from ds_patches.diagnostics import given
from ds_patches.diagnostics.defects import KEYS, SAID, SETTINGS, Defect
from ds_patches.diagnostics.findings import SCRIPT

#: Whether something is so; where that is open, by which setting, or SCRIPT.
Facts = Mapping[str, bool | str | int]
Settings = Mapping[str, Any]

#: Every configuration of DeepSpeed has one of these, and Accelerate's words for it one of those.
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu")
_ITS = ("zero_optimization", *_BATCHES)
_WORDS = ("zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_init_flag")
#: How a YAML of a framework, or of DeepSpeed's settings, is known among logs; a line of words.
_YAML = re.compile(r"^(?:deepspeed|deepspeed_config|distributed_type|zero_optimization)\s*:", re.M)
_WORDED = re.compile(r"^(?!\s*#)(?:(?=[^:\n]*$)\w\S* \S+ \S|[^\n]*\wError: )", re.M)
_STEPS, _CLIPPING = "gradient_accumulation_steps", "gradient_clipping"
_HALVES = {"bf16": "fp16", "fp16": "bf16"}
#: What stands for off.
_OFF = ("", "0", "0.0", "false", "f", "no", "n", "off", "none")
#: Older names of sections of `zero_optimization`, which are switches.
_OLDER = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
#: The configurations that ms-swift ships, by the names that stand for them.
_SWIFT = re.compile(r"zero([0-3])(_offload)?")
_AUTO = dict.fromkeys((*_BATCHES, _STEPS, _CLIPPING, "bf16", "fp16"), "auto")


@dataclass(frozen=True)
class Configuration:
    """What a training's settings are; by default nothing is known.

    facts: what decides. settings: as the file has them. warnings: what DeepSpeed reads otherwise.
    """

    facts: Facts = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def conditions(self, defect: Defect) -> tuple[str, ...] | None:
        """Return on what a defect depends, open settings and SCRIPT; None if it cannot show."""
        if defect.stages and self.facts.get("stage") not in (None, *defect.stages):
            return None
        each = [self.facts.get(name, SCRIPT) for name in defect.needs.split()]
        if False in each:
            return None
        return tuple(dict.fromkeys(fact for fact in each if isinstance(fact, str)))

    def evidence(self, defect: Defect) -> tuple[str, ...]:
        """Return the settings that bring a defect about, as the file has them."""
        names = [name for name in defect.needs.split() if self.facts.get(name) is True]
        stage = [f"ZeRO {self.facts['stage']}"] if "stage" in self.facts else []
        return (*stage, *map(self._quoted, names))

    def _quoted(self, name: str) -> str:
        for place in reversed(SETTINGS.get(name, [])):
            key = place.partition("=")[0]
            value = _value(self.settings, key)
            # Not a container: of a YAML with aliases its text may be longer than any memory.
            if isinstance(value, (bool, int, float, str)):
                return f'"{key}": {str(value).lower()[:40]}'
        return SAID.get(name, name.replace("_", " "))


def is_one(name: str, text: str) -> bool:
    """Return True if a file is a configuration, or means to be one."""
    begins = text.lstrip()[:1] == "{" and not re.match(r"\s*\{[^\n]*\}\s*\n\s*\{", text)
    is_yaml = len(text) <= given.LONGEST and _YAML.search(text) and not _WORDED.search(text)
    return name.endswith((".json", ".yaml", ".yml")) or begins or bool(is_yaml)


def read(name: str, text: str, folder: Path) -> Configuration:
    """Read DeepSpeed's JSON, or the YAML of a framework around one.

    Raises FlagError for a file that is none of these.
    """
    warnings: list[str] = []
    outer = given.settings(name, text, warnings)
    if (kind := outer.get("distributed_type", "DEEPSPEED")) != "DEEPSPEED":
        its = kind if isinstance(kind, str) else type(kind).__name__
        raise FlagError(f"{name} has no DeepSpeed configuration: its distributed_type is {its}")
    inner = outer.get("deepspeed_config", outer.get("deepspeed", outer))
    if isinstance(inner, Mapping):
        inner = inner.get("deepspeed_config_file", inner)
    if isinstance(inner, str):
        inner = _named(name, inner, folder, warnings)
    if not isinstance(inner, Mapping) or not any(key in inner for key in (*_ITS, *_WORDS)):
        near = [_near(key, "") for key in inner] if isinstance(inner, Mapping) else []
        hint = "".join(f"; did you mean {key!r}?" for key in filter(None, near))
        raise FlagError(f"{name} has no DeepSpeed configuration{hint}")
    return of(name, inner, outer if inner is not outer else None, warnings)


def of(
    name: str, inner: Settings, outer: Settings | None = None, warnings: list[str] | None = None
) -> Configuration:
    """Return what settings decide. inner: DeepSpeed's, or Accelerate's words for it.

    outer: the file around it. Raises FlagError if one has a wrong type.
    """
    warned = [*(warnings or ()), *_misspelt(inner)]
    try:
        facts = _facts(inner, outer)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise FlagError(f"{name} has a setting of a wrong type: {error}") from error
    return Configuration(facts, {**(outer or {}), **inner}, tuple(warned))


def said(setting: str) -> str:
    """Return in words what it takes of an open setting."""
    return f"{setting} is above 1" if setting == _STEPS else f"{setting} is on"


def _facts(inner: Settings, outer: Settings | None) -> Facts:
    """outer fills in what is "auto"; what Accelerate's words lack, is."""
    if isinstance(on := inner.get("zero_optimization"), bool):  # its older form
        inner = {**inner, "zero_optimization": {"stage": 1} if on else {}}
    if "bfloat16" in inner:  # its older name
        inner = {"bf16": inner["bfloat16"], **inner}
    for name in ("zero_optimization", "optimizer", "scheduler", "checkpoint"):
        if not isinstance(inner.get(name, {}), Mapping):
            raise TypeError(f"{name} is no section")
    zero: Settings = inner.get("zero_optimization", {})
    older = {new: {"device": "cpu"} for old, new in _OLDER.items() if _switch(zero.get(old), old)}
    if older:
        inner = {**inner, "zero_optimization": (zero := older | dict(zero))}
    words = "zero_optimization" not in inner and any(name in inner for name in _WORDS)
    stage = float(zero.get("stage", inner.get("zero_stage", 2 if words else 0)))
    if stage not in range(4):
        raise ValueError("there is no such ZeRO stage")
    stage = int(stage)
    schedule: Settings = inner.get("scheduler", {})
    halves = {name: _half(name, inner, outer) for name in _HALVES}
    if [*halves.values()] == [True, True]:
        raise ValueError("bf16 and fp16 are both on")
    half = next((on for on in (True in halves.values(), *halves.values()) if on), False)
    facts = settings({**(outer or {}), **inner})  # a trainer's `optim`, too
    is_accelerates = outer is not None and bool({"deepspeed_config", "distributed_type"} & {*outer})
    return facts | halves | {
        "stage": stage,
        "zero3": stage == 3,
        "overlap": _switch(zero.get("overlap_comm", stage == 3), "overlap_comm"),
        "accumulation": _accumulates(inner, outer or {}, words),
        "unclipped": inner.get(_CLIPPING) is None and not words,
        "filled": is_accelerates and inner.get(_CLIPPING, "auto" if words else 0) == "auto",
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
    facts: dict[str, bool | str | int] = {}
    for name, places in SETTINGS.items():
        each = [_is_on(config, *place.split("=", 1)) for place in places]
        facts[name] = True in each or (SCRIPT if None in each else False)
    return facts


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def _is_on(config: Any, key: str, pattern: str = "") -> bool | None:
    config = _value(config, key)
    # Of a YAML with aliases the text of a container may be longer than any memory.
    value = "..." if isinstance(config, (Mapping, list)) else str(config).lower()
    if value == "auto":
        return None
    return bool(re.fullmatch(pattern, value)) if pattern else value not in _OFF


def _accumulates(inner: Settings, outer: Settings, words: bool) -> bool | str:
    follows = all(isinstance(inner.get(name), int) for name in _BATCHES)
    value = inner.get(_STEPS)
    value = ("auto" if words or follows else 1) if value is None else value
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


def _misspelt(config: Settings) -> list[str]:
    """Return a warning for each key that DeepSpeed does not know and that resembles another."""
    warnings = []
    for section in KEYS:
        keys = config.get(section) if section else config
        for key in keys if isinstance(keys, Mapping) else ():
            if near := _near(key, section):
                of = f" in {section!r}" * bool(section)
                warnings.append(f"DeepSpeed does not know {key!r}{of}: did you mean {near!r}?")
    return warnings


def _near(key: Any, section: str) -> str:
    known = KEYS[section]
    is_known = not isinstance(key, str) or key in known or key in _WORDS
    return "" if is_known else next(iter(get_close_matches(key, known, 1, 0.85)), "")


def _named(name: str, inner: str, folder: Path, warnings: list[str]) -> Settings:
    """Return the configuration that a framework's file names."""
    beside = (folder / inner, Path(inner), folder / Path(inner).name)
    if file := next(filter(os.path.exists, beside), None):
        text = given.content(Path(file), given.LONGEST + 1).decode(errors="replace")
        return given.settings(str(file), text, warnings)
    if swift := _SWIFT.fullmatch(inner):
        offload = {"offload_optimizer": {"device": "cpu"}} if swift[2] else {}
        return {**_AUTO, "zero_optimization": {"stage": int(swift[1]), **offload}}
    raise FlagError(f"{name} names {inner!r}, and there is no such file")
