"""Reads the configuration of a training: which settings decide that a defect can occur."""

import json
import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ds_patches.core.errors import FlagError
from ds_patches.diagnostics.defects import DEFAULT_TEXTS, KEYS, SETTINGS, Defect
from ds_patches.diagnostics.findings import SCRIPT

#: For each condition True, False, the setting that decides it, or SCRIPT; and the "stage".
Facts = Mapping[str, bool | str | int]
Settings = Mapping[str, Any]

#: Keys of which every DeepSpeed configuration has one, and Accelerate's file without one.
BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu")
_DEEPSPEED = ("zero_optimization", *BATCHES)
_ACCELERATE = ("zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_init_flag")
#: Matches the YAML of a framework, or of DeepSpeed's settings; and a line of prose or of an error.
_YAML = re.compile(r"^(?:deepspeed|deepspeed_config|distributed_type|zero_optimization)\s*:", re.M)
_PROSE = re.compile(r"^(?!\s*#)(?:(?=[^:\n]*$)\w\S* \S+ \S|[^\n]*\wError: )", re.M)
#: Matches a log that begins with a metric, as `{'loss': 1.2}`, or has one in each line.
_METRICS = re.compile(r"\s*\{(?:'|[^\n]*\}\s*\n\s*\{)")
STEPS, _CLIPPING = "gradient_accumulation_steps", "gradient_clipping"
#: The largest configuration in bytes.
_MAX_CONFIG = 1 << 16
#: Bytes of a chunk of a file, of which the last two are kept, and how many chunks are read.
_CHUNK, _MAX_CHUNKS = 1 << 27, 4
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*"?)|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\])*"?)|,(?=\s*[}\]])')

#: The half precision dtypes, each with the other one.
_HALF_DTYPES = {"bf16": "fp16", "fp16": "bf16"}
#: The facts that DeepSpeed prints in single lines, without the whole configuration.
_SINGLE = {"stage", "zero3", "accumulation", "unclipped", *_HALF_DTYPES, "bf16_or_fp16", "single"}
#: Values that mean off.
_OFF = ("", "0", "0.0", "false", "f", "no", "n", "off", "none")
#: Deprecated switches of `zero_optimization`, and the sections that replaced them.
_DEPRECATED = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
#: Names of the configurations that ms-swift ships, and their common settings.
_SWIFT = re.compile(r"zero([0-3])(_offload)?")
_SWIFT_SETTINGS = dict.fromkeys((*BATCHES, STEPS, _CLIPPING, "bf16", "fp16"), "auto")


@dataclass(frozen=True)
class Configuration:
    """The settings of a training; by default none is known.

    settings: as in the file. warnings: keys that DeepSpeed does not know or refuses.
    """

    facts: Facts = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def conditions(self, defect: Defect) -> tuple[str, ...] | None:
        """Return the undecided settings a defect needs, and SCRIPT; None if it cannot occur."""
        if defect.stages and self.facts.get("stage") not in (None, *defect.stages):
            return None
        facts = [self.facts.get(name, SCRIPT) for name in defect.needs.split()]
        if False in facts:
            return None
        return tuple(dict.fromkeys(fact for fact in facts if isinstance(fact, str)))

    def evidence(self, defect: Defect) -> tuple[str, ...]:
        """Return the settings that cause a defect, as they are written in the file."""
        names = [name for name in defect.needs.split() if self.facts.get(name) is True]
        stage = [f"ZeRO {self.facts['stage']}"] if "stage" in self.facts else []
        return (*stage, *map(self._quoted, names))

    def _quoted(self, name: str) -> str:
        for setting in reversed(SETTINGS.get(name, [])):
            key = setting.partition("=")[0]
            value = _value(self.settings, key)
            if isinstance(value, (bool, int, float, str)):
                return f'"{key}": {str(value).lower()[:40]}'
        return DEFAULT_TEXTS.get(name, name.replace("_", " "))


def text_of(file: str) -> str:
    """Return the end of a file, or of the standard input for "-"; raises FlagError.

    A stream may be endless: reading stops after 512 MiB.
    """
    try:
        with open(0 if file == "-" else file, "rb", closefd=file != "-") as opened:
            if opened.seekable():
                opened.seek(max(0, opened.seek(0, os.SEEK_END) - 2 * _CHUNK))
            chunks = islice(iter(partial(opened.read, _CHUNK), b""), _MAX_CHUNKS)
            return b"".join(deque(chunks, maxlen=2)).decode(errors="replace")
    except OSError as error:
        raise FlagError(f"{file} cannot be read: {error.strerror}") from error


def is_configuration(name: str, text: str) -> bool:
    """Return True if a file is to be read as a configuration, by its name or content."""
    is_json = text.lstrip()[:1] == "{" and not _METRICS.match(text)
    is_yaml = len(text) <= _MAX_CONFIG and _YAML.search(text) and not _PROSE.search(text)
    return name.endswith((".json", ".yaml", ".yml")) or is_json or bool(is_yaml)


def read(name: str, text: str) -> Configuration:
    """Read DeepSpeed's JSON, or a framework's YAML that contains or names it.

    name: the file, beside which a file that it names is looked for. Raises FlagError for any other.
    """
    warnings: list[str] = []
    outer = _parsed(name, text, warnings)
    if (kind := outer.get("distributed_type", "DEEPSPEED")) != "DEEPSPEED":
        raise FlagError(f"{name} has no DeepSpeed configuration: its distributed_type is {kind}")
    inner = outer.get("deepspeed_config", outer.get("deepspeed", outer))
    if isinstance(inner, Mapping):
        inner = inner.get("deepspeed_config_file", inner)
    if isinstance(inner, str):
        inner = _referenced(name, inner, warnings)
    if not isinstance(inner, Mapping) or {*inner}.isdisjoint((*_DEEPSPEED, *_ACCELERATE)):
        hints = _misspelt(inner) if isinstance(inner, Mapping) else ()
        raise FlagError("; ".join([f"{name} has no DeepSpeed configuration", *hints]))
    return from_settings(name, inner, outer if inner is not outer else None, warnings)


def from_settings(
    name: str,
    inner: Settings,
    outer: Settings | None = None,
    warnings: list[str] | None = None,
    is_partial: bool = False,
) -> Configuration:
    """Return the configuration for settings; raises FlagError if one has a wrong type.

    inner: DeepSpeed's settings, or Accelerate's keys for them. outer: the framework's file.
    is_partial: they are those that DeepSpeed prints in single lines; the others are not known.
    """
    warnings = [*(warnings or ()), *_misspelt(inner)]
    try:
        facts = _facts(inner, outer)
        if is_partial:
            facts = {name: facts[name] if name in _SINGLE else SCRIPT for name in facts}
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise FlagError(f"{name} has a setting of a wrong type: {error}") from error
    return Configuration(facts, {**(outer or {}), **inner}, tuple(warnings))


def _facts(inner: Settings, outer: Settings | None) -> Facts:
    """Return the facts; `outer` has the values of settings that are "auto" or have no key."""
    if isinstance(on := inner.get("zero_optimization"), bool):  # the deprecated form of the section
        inner = {**inner, "zero_optimization": {"stage": 1} if on else {}}
    if "bfloat16" in inner:  # the deprecated name of the section
        inner = {"bf16": inner["bfloat16"], **inner}
    for name in ("zero_optimization", "optimizer", "scheduler", "checkpoint"):
        if not isinstance(inner.get(name, {}), Mapping):
            raise TypeError(f"{name} is not a section")
    zero: Settings = inner.get("zero_optimization", {})
    cpu = {"device": "cpu"}
    if offloads := {new: cpu for old, new in _DEPRECATED.items() if _switch(zero.get(old), old)}:
        inner = {**inner, "zero_optimization": (zero := offloads | dict(zero))}
    is_accelerates = "zero_optimization" not in inner and any(key in inner for key in _ACCELERATE)
    stage = float(zero.get("stage", inner.get("zero_stage", 2 if is_accelerates else 0)))
    if stage not in range(4):
        raise ValueError(f"there is no ZeRO stage {stage:g}")
    stage = int(stage)
    schedule: Settings = inner.get("scheduler", {})
    halves = {name: _half(name, inner, outer) for name in _HALF_DTYPES}
    if [*halves.values()] == [True, True]:
        raise ValueError("bf16 and fp16 are both on")
    half = next((is_on for is_on in (True in halves.values(), *halves.values()) if is_on), False)
    facts = settings({**(outer or {}), **inner})  # with a trainer's `optim`
    fills_in = outer is not None and bool({"deepspeed_config", "distributed_type"} & {*outer})
    return facts | halves | {
        "stage": stage,
        "zero3": stage == 3,
        "overlap": _switch(zero.get("overlap_comm", stage == 3), "overlap_comm"),
        "accumulation": _accumulates(inner, outer or {}, is_accelerates),
        "unclipped": inner.get(_CLIPPING) is None and not is_accelerates,
        "filled": fills_in and inner.get(_CLIPPING, "auto" if is_accelerates else 0) == "auto",
        "sums": facts["sums"] and halves["bf16"],
        "bf16_or_fp16": half,
        "single": SCRIPT if isinstance(half, str) else not half,
        "pipeline": "pipeline" in inner or SCRIPT,
        # Without a schedule in the configuration, the script decides.
        "warmup": "warmup_max_lr" not in schedule.get("params", {}) and facts["warmup"]
                  if schedule else SCRIPT,
        "cosine": facts["cosine"] if schedule else SCRIPT,
        "universal": bool(inner.get("checkpoint", {}).get("load_universal")),
        **dict.fromkeys((SCRIPT, "lightning", "moe"), SCRIPT),
    }  # fmt: skip


def settings(config: Settings) -> dict[str, bool | str | int]:
    """Return the value of each of the table's settings; SCRIPT if it is "auto"."""
    facts: dict[str, bool | str | int] = {}
    for name, keys in SETTINGS.items():
        values = [_is_on(config, *key.split("=", 1)) for key in keys]
        facts[name] = True in values or (SCRIPT if None in values else False)
    return facts


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def _is_on(config: Any, key: str, pattern: str = "") -> bool | None:
    setting = _value(config, key)
    # With YAML aliases, the text of a container may be larger than memory.
    value = "..." if isinstance(setting, (Mapping, list)) else str(setting).lower()
    if value == "auto":
        return None
    return bool(re.fullmatch(pattern, value)) if pattern else value not in _OFF


def _accumulates(inner: Settings, outer: Settings, is_accelerates: bool) -> bool | str:
    is_implied = all(isinstance(inner.get(name), int) for name in BATCHES)
    value = inner.get(STEPS)
    value = ("auto" if is_accelerates or is_implied else 1) if value is None else value
    value = outer.get(STEPS, value) if value == "auto" else value
    return STEPS if value == "auto" else int(value) > 1


def _half(name: str, inner: Settings, outer: Settings | None) -> bool | str:
    """Return if a half dtype is on, its name if undecided; a framework may have switched it on."""
    section = inner.get(name, {"enabled": False} if outer is None else "auto")
    value = section.get("enabled", False) if isinstance(section, Mapping) else section
    if value == "auto" and outer:
        chosen = outer.get("mixed_precision")
        if chosen in _HALF_DTYPES or outer.get(_HALF_DTYPES[name]) is True:
            value = chosen == name
        else:
            value = outer.get(name, "auto")
    return _switch(value, name)


def _switch(value: Any, name: str) -> bool | str:
    return name if value == "auto" else str(value).lower() not in _OFF


def _misspelt(config: Settings) -> list[str]:
    """Return a warning for each key that DeepSpeed does not know and that resembles another."""
    warnings = []
    for section, known in KEYS.items():
        keys = config.get(section) if section else config
        place = f" in {section!r}" * bool(section)
        keys = keys if isinstance(keys, Mapping) else ()
        for key in (key for key in keys if key not in (*known, *_ACCELERATE)):
            for similar in get_close_matches(str(key), known, 1, 0.85):
                hint = f"did you mean {similar!r}?"
                warnings.append(f"DeepSpeed does not know {key!r}{place}: {hint}")
    return warnings


def _referenced(name: str, inner: str, warnings: list[str]) -> Settings:
    """Return the configuration whose file a framework's file names."""
    folder = Path(name).parent
    candidates = (folder / inner, Path(inner), folder / Path(inner).name)
    if file := next(filter(os.path.exists, candidates), None):
        return _parsed(str(file), text_of(str(file)), warnings)
    if swift := _SWIFT.fullmatch(inner):
        offload = {"offload_optimizer": {"device": "cpu"}} if swift[2] else {}
        return {**_SWIFT_SETTINGS, "zero_optimization": {"stage": int(swift[1]), **offload}}
    raise FlagError(f"{name} names {inner!r}, which does not exist")


def _parsed(name: str, text: str, warnings: list[str]) -> Settings:
    """Read JSON, or else YAML, whatever the file is called; collect warnings."""
    if "\ufffd" in text:
        raise FlagError(f"{name} cannot be read: it is not text")
    if len(text) > _MAX_CONFIG:
        raise FlagError(
            f"{name} has more than {_MAX_CONFIG} bytes, which no DeepSpeed configuration has"
        )

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        duplicates = dict.fromkeys(key for key in keys if keys.count(key) > 1)
        warnings.extend(f"{key!r} is there twice: DeepSpeed refuses that" for key in duplicates)
        return dict(pairs)

    # DeepSpeed also accepts comments and trailing commas.
    plain = _TRAILING_COMMA.sub(r"\1", _COMMENT.sub(r"\1", text))
    try:
        config = json.loads(plain, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        config = _yaml(name, text, error)
    if not isinstance(config, Mapping):
        raise FlagError(f"{name} has no DeepSpeed configuration")
    return config


def _yaml(name: str, text: str, json_error: Exception) -> Any:
    try:
        import yaml
    except ImportError as error:
        message = f"{name} is no JSON ({json_error}); to read YAML: pip install pyyaml"
        raise FlagError(message) from error
    try:
        return yaml.safe_load(text)
    except Exception as error:  # PyYAML raises its own exceptions and Python's
        message = f"{name} is neither JSON ({json_error}) nor YAML ({str(error)[:300]})"
        raise FlagError(message) from error
