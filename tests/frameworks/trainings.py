"""Each script with and without DeepSpeed, what stock makes of it, and what it is held against."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks import runs, saved
from tests.frameworks.user import accelerated
from tests.harness.options import CPU
from tests.harness.trainers import Parameters, worst_difference
from tests.world import World

#: What stock comes to, where that is no error: its words are said then.
RIGHT, WRONG = "right", "wrong"
BOTH_RIGHT = {2: RIGHT, 3: RIGHT}
#: Of all that was learned, what single precision may be off, and what is lost at the least.
EXACT, LOST = 1e-4, 0.05
#: Of several micro steps the last alone counts, or those in the middle do not.
LOSES = {"0.18.2": {2: WRONG, 3: RIGHT}}
#: The Trainer's gradients are divided by the micro steps once or twice more.
DIVIDES = {"0.18.3": {2: WRONG, 3: WRONG}}
TWICE = {2: "has already been reduced", 3: "AssertionError"}


@dataclass(frozen=True, eq=False)
class Training:
    """One script.

    arguments: paths are of files in the folder of all. start: saves a model there, if it is to.
    given, without: what it gets with and without DeepSpeed.
    unset: settings that the framework wants to choose.
    stock, older: what stock comes to by stage, on the newest release, and by older ones.
    losses: how many of one process are one of both ranks together; 0: a rank tells its own.
    reductions: of a step, where it is right. package: of the extra `frameworks`, that it imports.
    """

    title: str
    script: str
    arguments: tuple[Any, ...]
    start: Callable[[Path], Parameters]
    stock: Mapping[int, str]
    older: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    reductions: int | None = None
    steps: int = 4
    given: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, Any] | None = None
    batch: int | str = "auto"
    losses: int = 1
    zero: Mapping[str, Any] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    package: str = ""

    def config(self, stage: int) -> dict[str, Any]:
        sizes = {"train_micro_batch_size_per_gpu": self.batch}
        if self.batch != "auto":
            sizes["gradient_accumulation_steps"] = self.given.get("micro_steps", 1)
        whole = runs.automatic(stage, **self.zero) | sizes
        return {name: value for name, value in whole.items() if name not in self.unset}

    def on_one(self, world: World, folder: Path) -> runs.Run:
        """The reference: one process, whose batches are those of both ranks."""
        without = self.given if self.without is None else self.without
        (result,) = world.run(runs.script, self.script, *_in(folder, self.arguments), **without)
        assert not result.error, result.error
        assert result.engine_steps is None
        assert not result.live, "the script applies them"
        return result

    def on_two(self, world: World, folder: Path, stage: int) -> runs.Run:
        arguments = (*_in(folder, self.arguments), self.config(stage))
        return runs.on_two(world, self.script, *arguments, **self.given)

    def assert_equal(self, result: runs.Run, reference: runs.Run, start: Parameters) -> None:
        """Losses and parameters are those of the reference."""
        if self.losses:
            losses = torch.tensor(reference.losses).view(-1, self.losses).mean(1).tolist()
            assert result.losses == pytest.approx(losses, rel=1e-5)
        assert self.part_lost(result, reference, start) < EXACT
        assert result.engine_steps == self.steps
        if self.reductions is not None:
            assert result.reductions == self.reductions * self.steps

    def part_lost(self, result: runs.Run, reference: runs.Run, start: Parameters) -> float:
        """How far a run ended from the reference, as a part of how far that went."""
        assert not result.error, result.error
        ends = {name: reference.parameters[name] for name in start}
        moved = worst_difference(ends, start)[0]
        assert moved > 0.01
        return worst_difference(result.parameters, reference.parameters)[0] / moved


def _in(folder: Path, arguments: tuple[Any, ...]) -> list[Any]:
    return [folder / argument if isinstance(argument, Path) else argument for argument in arguments]


def causal(folder: Path) -> Parameters:
    return saved.save_causal(folder / "lm")


def adapted(folder: Path) -> Parameters:
    """One adapter's half that begins with zeros."""
    causal(folder)
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.default.weight"
    return {name: torch.zeros(8, 2)}


def embedder(folder: Path) -> Parameters:
    return saved.save_embedder(folder / "embedder")


def heads(_: Path, prefix: str = "") -> Parameters:
    torch.manual_seed(accelerated.SEED)
    start = accelerated.TwoHeads().named_parameters()
    return {prefix + name: param.detach() for name, param in start}


def steps(micro_steps: int, **more: Any) -> dict[str, Any]:
    """One process has twice as many micro steps: those of both ranks."""
    of_one = {"micro_steps": 2 * micro_steps, **more}
    return {"given": {"micro_steps": micro_steps, **more}, "without": of_one}


LM = ("hf:language_model", (Path("lm"), Path("out")), causal)
SENTENCES = ("hf:sentences", (Path("embedder"), Path("out")), embedder, TWICE)
CHECKPOINTED = "Recomputed values for the following tensors have different metadata"
APART = {1: WRONG, 2: WRONG, 3: "size of tensor a (0)"}
LIT = ("lit:train", (Path("lightning"),), lambda _: heads(_, "net."))
DPO = ("hf:dpo", (Path("lm"), Path("dpo")), adapted, {3: RIGHT}, {"0.18.2": {3: CHECKPOINTED}})
ACCUMULATE = ("accelerated:train", (), heads, BOTH_RIGHT, LOSES)
ONCE, FOUR = {"reductions": 1}, {"reductions": 4}
HEADS: dict[str, Any] = {"batch": accelerated.BATCH, "losses": 2, "steps": 2}
OF_LIT: dict[str, Any] = {"batch": accelerated.BATCH, "losses": 0, "steps": 8, "reductions": 2}
OF_LIT |= {"unset": ("gradient_accumulation_steps", "gradient_clipping"), "package": "lightning"}
OF_DPO: dict[str, Any] = {"without": {"per_device_train_batch_size": 4}, "package": "trl"}
LOSSES = ("TripletLoss", "MultipleNegativesRankingLoss")

TRAINER = Training("Trainer, 4 micro steps", *LM, BOTH_RIGHT, LOSES | DIVIDES, **FOUR, **steps(4))
TRAININGS = [
    TRAINER,
    replace(TRAINER, title="the same, offload", zero={"offload_optimizer": CPU}),
    Training(
        "sentence-transformers, cached loss", *SENTENCES, {"0.18.2": TWICE}, **ONCE, **steps(1)
    ),
    Training("the same, 2 micro steps", *SENTENCES, **ONCE, **steps(2)),
    Training("Accelerate, `accumulate()`", *ACCUMULATE, **FOUR, **steps(4), **HEADS | {"steps": 2}),
    Training("TRL, DPO with LoRA", *DPO, steps=2, **ONCE, **OF_DPO),
    Training("Lightning, two losses", *LIT, APART, **OF_LIT),
]
TRAININGS += [
    Training(
        f"sentence-transformers, {loss}",
        *SENTENCES,
        {"0.18.2": TWICE},
        **ONCE,
        **steps(1, loss=loss),
    )
    for loss in LOSSES
]
