"""Options of a training, for an engine and for plain PyTorch.

A case is a script and its :class:`Options`: `run(script, Options(stage=2, micro_steps=4), ...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

#: How far from plain PyTorch is equal: a few rounding steps of a parameter of size 1 or 2.
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-6, "float16": 2**-9}
HALVES: Mapping[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"bf16": {"enabled": True}},
    "float16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
CPU = {"device": "cpu"}

# Options that many tests give, by name.
Given = dict[str, Any]
OFFLOADED: Given = {"offload": ("optimizer",)}
OFFLOADED_ALL: Given = {"offload": ("optimizer", "param")}
OVERLAP: Given = {"zero": {"overlap_comm": True}}
ALL_REDUCED: Given = {"zero": {"reduce_scatter": False}}
SCATTERED: Given = {"zero": {"contiguous_gradients": False}}
BF16: Given = {"dtype": "bfloat16"}
BF16_SUMS: Given = {"dtype": "bfloat16", "sums": "fp32"}
FP16: Given = {"dtype": "float16"}
ADAMW: Given = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
ADAM: Given = {"settings": {"optimizer": ADAMW}}  # in place of SGD
PERSISTENT: Given = {"stage3_param_persistence_threshold": 40}
NO_REUSE: Given = {"stage3_max_reuse_distance": 0}
SMALL_PREFETCH: Given = {"stage3_prefetch_bucket_size": 600}


@dataclass(frozen=True)
class Options:
    """The options of one training.

    style: of calling backward: "engine", "scale" or "torch".
    dtype: of the model. sums: of what gradients add up in, where it is another one.
    rates: of learning, each of one group of parameters.
    offload: "optimizer", "param".
    zero, settings: of the configuration and its zero_optimization, as they are.
    """

    stage: int = 3
    model: str = "TwoHeads"
    style: str = "engine"
    steps: int = 3
    micro_steps: int = 1
    dtype: str = "float32"
    sums: str = ""
    clip: float = 0.0
    muon: bool = False  # in place of SGD
    fused: bool = False  # SGD, for which the engine takes its optimizer of FusedAdam
    rates: tuple[float, ...] = (0.1,)
    grid: bool = False  # four ranks train as two groups of two
    offload: tuple[str, ...] = ()
    zero: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return ROUNDING[self.dtype]

    @property
    def shows(self) -> dict[str, Any]:
        """The options that are not default: few quick cases are chosen to show them all."""
        return {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if getattr(self, option.name) != getattr(PLAIN, option.name)
        }

    def at(self, stage: int, **changed: Any) -> Options:
        return replace(self, stage=stage, **changed)

    @property
    def torch_dtype(self) -> Any:
        return getattr(torch, self.dtype)

    @property
    def config(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        sums = {"data_types": {"grad_accum_dtype": self.sums}} if self.sums else {}
        return config(
            self.stage,
            micro_steps=self.micro_steps,
            gradient_clipping=self.clip,
            zero={**{f"offload_{part}": CPU for part in self.offload}, **self.zero},
            **{**HALVES[self.dtype], **sums, **self.settings},
        )


PLAIN = Options()


def config(stage: int, *, micro_steps: int | str = 1, **overrides: Any) -> dict[str, Any]:
    """A DeepSpeed configuration with every default that moved between releases pinned."""
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_bucket_size": 500,
        **overrides.pop("zero", {}),
    }
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **overrides,
    }
