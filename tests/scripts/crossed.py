"""Options crossed with scripts: each script with few rows of choices, in which all choices occur.

Rows are of chance, and seeded by the script's name: a case keeps its meaning when another script
comes. What a script declares of its own is its subject and stays; a choice that would change it is
not made.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import FunctionType
from typing import Any

from tests.harness import ALL_REDUCED, EAGER, Options, Outcome, RankError, WorldTimeout
from tests.scripts.declared import STEPS, Script, scripts
from tests.scripts.worlds import Worlds

#: What is in a script that with more micro steps is another script, or is not plain PyTorch's: it
#: counts them, drops or loses some, or has a backward that is not divided there.
COUNTING = {"boundary", "zero_grad", "zero_optimizer_grad", "load", "is_engine", "plain_backward"}
COUNTING |= {"change_grads", "full_grads"}  # they are whole at the boundary alone
COUNTING.add("window_over_an_auxiliary_tensor")  # its backwards are those of plain_backward
#: And in one that makes gradients of its own, for which it would have to know the loss scale.
MAKING = {"give", "change_grads", "full_grads", "register_hook", "register_forward_hook"}
MAKING.add("_backward_epilogue")  # nothing scales its loss
#: Large, so that what is lost is more than what half precision rounds off.
RATE = 0.5
#: How far from plain PyTorch in single precision an engine may end: with bf16 parameters, and with
#: fp16 ones or under autocast. Measured are 0.015 and 0.007; what is lost makes 0.03 and more.
BF16_ROUNDS, FP16_ROUNDS = 0.025, 0.01


@dataclass(frozen=True)
class Choice:
    """A choice of one option: what it sets, and the stages that have it."""

    name: str
    given: Mapping[str, Any] = field(default_factory=dict)  # of Options
    zero: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = (1, 2, 3)
    tolerance: float = 1e-5

    def suits(self, script: Script) -> bool:
        """Return True if the choice changes nothing that the script declares or does by itself."""
        own = script.options
        usual = Options(steps=STEPS, model="Deep" if own.model == "Deep" else Options.model)
        own_names = {
            name
            for name in (option.name for option in fields(own))
            if getattr(own, name) != getattr(usual, name)
        }
        names = _called(script)
        if COUNTING & names and self.given.get("micro_steps") != 1:
            own_names.add("micro_steps")
        scaled = "fp16" in self.settings and MAKING & names
        rounds = self.tolerance >= FP16_ROUNDS and own.clip  # to less than is seen
        settings = scaled or rounds or (self.settings and own.settings)
        return not (own_names & self.given.keys() or own.zero.keys() & self.zero.keys() or settings)


def _called(script: Script) -> set[str]:
    """Its name, and those in it and in what it calls of these scripts."""
    called: set[str] = set()
    functions: list[Any] = [script.train]
    for function in functions:  # which become more
        names = {function.__name__, *function.__code__.co_names}
        others = [function.__globals__.get(name) for name in names - called]
        others = [value.train if isinstance(value, Script) else value for value in others]
        others = [value for value in others if isinstance(value, FunctionType)]
        functions += [f for f in others if f.__module__.startswith("tests.scripts.")]
        called |= names
    return called


#: Also without ZeRO.
ANY = (0, 1, 2, 3)
#: As it is without being chosen.
PLAIN = Choice("", stages=ANY)
#: Scripts that mean the same without ZeRO.
UNSHARDED = {"one_backward", "micro_steps", "skipped_step", "reentrant", "non_reentrant"}
UNSHARDED.add("shared_block")
BF16 = {"bf16": {"enabled": True}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
DYNAMIC = {"fp16": {"enabled": True, "initial_scale_power": 8}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
CONFIGURED = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
PRESCALED = {"prescale_gradients": True}
#: Of the low-rank model: one more would make a leaf of the whole, which stock does not train, as it
#: does not train a block whose inputs need no gradient.
WHOLE_BLOCKS = {"stage3_module_granularity_threshold": 129}

FACTORS: Mapping[str, tuple[Choice, ...]] = {
    "stage": tuple(Choice(f"zero{n}", {"stage": n}, stages=(n,)) for n in ANY),
    "overlap": (PLAIN, Choice("overlap", zero={"overlap_comm": True})),
    "contiguous": (PLAIN, Choice("scattered", zero={"contiguous_gradients": False}, stages=(1, 2))),
    "bucket": (
        Choice("tiny_bucket", zero={"reduce_bucket_size": 40}),
        Choice("large_bucket", zero={"reduce_bucket_size": 10**6}),
    ),
    "micro_steps": (
        PLAIN,
        Choice("micro2", {"micro_steps": 2}, stages=ANY),
        Choice("micro4", {"micro_steps": 4, "steps": 9}, stages=ANY),
    ),
    "offload": (
        PLAIN,
        Choice("offloaded", {"offload": ("optimizer",)}),
        Choice("offloaded_all", {"offload": ("optimizer", "param")}, stages=(3,)),
    ),
    "precision": (
        PLAIN,
        Choice("bf16", settings=BF16, stages=ANY, tolerance=BF16_ROUNDS),
        Choice("bf16_fp32_sums", settings=BF16 | FP32_SUMS, tolerance=BF16_ROUNDS),
        Choice("fp16", settings=DYNAMIC, stages=ANY, tolerance=FP16_ROUNDS),
        Choice("autocast", settings=AUTOCAST, tolerance=BF16_ROUNDS),
    ),
    "division": (
        PLAIN,
        # DeepSpeed asks for it where gradients are divided before they are added.
        Choice("prescaled", zero=ALL_REDUCED["zero"], settings=PRESCALED, stages=(1, 2)),
        Choice("predivided", zero=ALL_REDUCED["zero"], settings={"gradient_predivide_factor": 4.0}),
    ),
    "clip": (PLAIN, Choice("clipped", {"clip": 1.0}, stages=ANY)),
    "optimizer": (PLAIN, Choice("configured", settings=CONFIGURED, stages=ANY)),
    "groups": (PLAIN, Choice("groups", {"rates": (RATE, RATE / 2)}, stages=ANY)),
    "model": (
        PLAIN,
        Choice("frozen", {"model": "FrozenTrunk"}, stages=ANY),
        Choice("tied", {"model": "TiedEmbedding"}, stages=ANY),
        Choice("whole_blocks", {"model": "AdaptedToTheInputs"}, zero=WHOLE_BLOCKS, stages=(3,)),
    ),
    "gathers": (
        PLAIN,
        Choice("persistent", zero={"stage3_param_persistence_threshold": 100}, stages=(3,)),
    ),
    "partitions": (
        PLAIN,
        Choice("small_groups", zero={"sub_group_size": 200}, stages=(3,)),
        Choice("hpz", zero={"zero_hpz_partition_size": 2}, stages=(3,)),
        Choice("round_robin", zero={"round_robin_gradients": True}, stages=(1, 2)),
    ),
}

#: In place of micro steps, in one more row of each script: the others stay what they were.
UNMANAGED = Choice(
    "unmanaged", {"micro_steps": 1}, settings={"managed_gradient_accumulation": False}
)

Row = tuple[Choice, ...]


@dataclass(frozen=True)
class Crossed:
    """A script, and the options that it is run with."""

    script: Script
    row: Row

    @property
    def name(self) -> str:
        return "-".join([self.script.name, *(choice.name for choice in self.row if choice.name)])

    @property
    def stage(self) -> int:
        return int(self.row[0].given["stage"])

    def run(self, worlds: Worlds, way: str) -> list[Outcome]:
        """By stock or patched; what is equal to plain PyTorch depends on how far that went.

        Where stock adds gradients of different sizes, gloo may end its process.
        """
        try:
            outcomes = worlds.run(self.script, self.stage, way, looks=False, **self.options)
        except (RankError, WorldTimeout) as error:
            outcomes = [Outcome(error=f"{type(error).__name__}: {error}")]
        tolerance = max(2 * self.script.tolerance, *(choice.tolerance for choice in self.row))
        for outcome in outcomes:
            outcome.tolerance = tolerance * max(1.0, 2 * outcome.moved)
        return outcomes

    @property
    def options(self) -> dict[str, Any]:
        """In place of those that the script declares."""
        own = self.script.options
        merged: dict[str, Any] = {"rates": (RATE,), "zero": {}, "settings": dict(own.settings)}
        for choice in self.row[1:]:
            merged |= choice.given
            merged["zero"] |= choice.zero
            merged["settings"] |= choice.settings
        merged["zero"] |= own.zero
        return merged


def cases() -> list[Crossed]:
    eager = (script for script in scripts() if script.on == EAGER)
    return [Crossed(script, row) for script in eager for row in rows(script)]


def rows(script: Script) -> Iterator[Row]:
    """As few as are found for every choice to occur that a stage of the script has."""
    generator = random.Random(script.name)
    unsharded = (0,) * (script.name in UNSHARDED)
    stages = [_choices(script, stage) for stage in (*script.stock, *unsharded)]
    left = {
        (n, choice.name)
        for stage in stages
        for n, choices in enumerate(stage)
        for choice in choices
    }
    while left:
        missing = [
            [[c for c in choices if (n, c.name) in left] for n, choices in enumerate(stage)]
            for stage in stages
        ]
        most = max(range(len(stages)), key=lambda stage: sum(map(len, missing[stage])))
        row = tuple(
            generator.choice(new or choices)
            for new, choices in zip(missing[most], stages[most], strict=True)
        )
        left -= {(factor, choice.name) for factor, choice in enumerate(row)}
        yield row
    if row[0].stages[0] and UNMANAGED.suits(script):
        place = [*FACTORS].index("micro_steps")
        yield (*row[:place], UNMANAGED, *row[place + 1 :])


def _choices(script: Script, stage: int) -> list[list[Choice]]:
    """Return the choices of each option that a script may have at a stage."""
    return [
        [choice for choice in choices if stage in choice.stages and choice.suits(script)] or [PLAIN]
        for choices in FACTORS.values()
    ]
