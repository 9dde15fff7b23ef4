"""Each script with and without DeepSpeed, what stock makes of it, and what it is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.frameworks import runs, saved
from tests.frameworks.user import accelerated, engines
from tests.training.trainers import Parameters
from tests.world import World

#: What stock comes to, where that is no error: its words are said then.
RIGHT, WRONG = "right", "wrong"
BOTH_RIGHT = {2: RIGHT, 3: RIGHT}
#: Of several micro steps the last alone counts, or those in the middle do not.
LOSES = {2: WRONG, 3: RIGHT}
TWICE = {2: "has already been reduced", 3: "AssertionError"}
REFUSED = {
    stage: f"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage"
    f" {stage}"
    for stage in (2, 3)
}


@dataclass(frozen=True, eq=False)
class Training:
    """One script.

    arguments: paths are of files in the folder of all. start: saves a model there, if it is to.
    given, without: what it gets with and without DeepSpeed; and other arguments without, `alone`.
    unset: settings that the framework wants to choose.
    stock, old: what stock comes to by stage, on the newest release and on an old one.
    old_fails: stages at which patched has stock's error there.
    losses: how many of one process are one of both ranks together; 0: a rank tells its own.
    reductions: of a step, where it is right.
    """

    title: str
    script: str
    arguments: tuple[Any, ...]
    start: Callable[[Path], Parameters]
    stock: Mapping[int, str]
    old: Mapping[int, str] = field(default_factory=dict)
    old_fails: tuple[int, ...] = ()
    reductions: int | None = None
    steps: int = 4
    given: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, Any] | None = None
    alone: tuple[Any, ...] = ()
    batch: int | str = "auto"
    losses: int = 1
    zero: Mapping[str, Any] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    exhaustive: bool = False

    def config(self, stage: int) -> dict[str, Any]:
        sizes = {"train_micro_batch_size_per_gpu": self.batch}
        if self.batch != "auto":
            sizes["gradient_accumulation_steps"] = self.given.get("micro_steps", 1)
        whole = runs.automatic(stage, **self.zero) | sizes
        return {name: value for name, value in whole.items() if name not in self.unset}

    def on_one(self, world: World, folder: Path) -> runs.Run:
        """The reference: one process, whose batches are those of both ranks."""
        without = self.given if self.without is None else self.without
        return runs.on_one(
            world, self.script, *_in(folder, self.alone or self.arguments), **without
        )

    def on_two(self, world: World, folder: Path, stage: int, **more: Any) -> runs.Run:
        arguments = (*_in(folder, self.arguments), self.config(stage))
        return runs.on_two(world, self.script, *arguments, **{**self.given, **more})

    def assert_equal(self, found: runs.Run, reference: runs.Run, start: Parameters) -> None:
        """Losses and parameters are those of the reference, which has moved away from `start`."""
        if self.losses:
            losses = torch.tensor(reference.losses).view(-1, self.losses).mean(1).tolist()
            runs.assert_near(found.losses, losses)
        runs.assert_equal(found, reference)
        assert runs.moved(reference, start) > 1e4 * runs.EXACT
        assert found.engine_steps == self.steps
        if self.reductions is not None:
            assert found.reductions == self.reductions * self.steps


def _in(folder: Path, arguments: tuple[Any, ...]) -> list[Any]:
    return [folder / one if isinstance(one, Path) else one for one in arguments]


def named(seed: int, build: Callable[[], torch.nn.Module], prefix: str = "") -> Parameters:
    torch.manual_seed(seed)
    return {prefix + name: param.detach() for name, param in build().named_parameters()}


def causal(folder: Path) -> Parameters:
    return saved.save_causal(folder / "lm")


def adapted(folder: Path) -> Parameters:
    """One adapter's half that begins with zeros."""
    causal(folder)
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.default.weight"
    return {name: torch.zeros(8, 2)}


def embedder(folder: Path) -> Parameters:
    return saved.save_embedder(folder / "embedder")


def heads(_: Path) -> Parameters:
    return named(accelerated.SEED, accelerated.TwoHeads)


def encoder(_: Path, seed: int = 9) -> Parameters:
    return named(seed, lambda: engines.two_layers(engines.WIDTH))


def generator(_: Path) -> Parameters:
    return encoder(_, 8)


FOUR: dict[str, Any] = {"given": {"micro_steps": 4}, "without": {"micro_steps": 8}}
LM = ("hf_trainer", (Path("lm"), Path("out")), causal)
SENTENCES = ("sentences", (Path("embedder"), Path("out")), embedder)
HEADS: dict[str, Any] = {"batch": accelerated.BATCH, "losses": 2}
LAYERS: dict[str, Any] = {"batch": engines.BATCH, "losses": 0, "steps": engines.STEPS}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}

TRAINER = Training("Trainer, 4 micro steps", *LM, BOTH_RIGHT, LOSES, reductions=4, **FOUR)
TRAINER_OFFLOADED = Training(
    "the same, offload", *LM, BOTH_RIGHT, LOSES, reductions=4, zero=OFFLOAD, exhaustive=True, **FOUR
)
TWO_LOSSES = Training(
    "Accelerate, two losses, `no_sync()` of the engine",
    "accelerated",
    ("two_losses_of_engine",),
    heads,
    REFUSED,
    REFUSED,
    reductions=1,
    steps=8,
    given={"micro_steps": 1},
    without={"micro_steps": 2},
    alone=("two_losses",),
    **HEADS,
)
GRADCACHE = Training(
    "GradCache's loop",
    "engines",
    ("cached_gradients",),
    encoder,
    {1: WRONG, 2: WRONG, 3: RIGHT},
    reductions=4,
    exhaustive=True,
    **LAYERS,
)
TRAININGS = [
    TRAINER,
    TRAINER_OFFLOADED,
    Training(
        "sentence-transformers, cached loss",
        *SENTENCES,
        TWICE,
        TWICE,
        reductions=1,
        given={"micro_steps": 1},
        without={"micro_steps": 2},
    ),
    Training(
        "the same, 2 micro steps",
        *SENTENCES,
        TWICE,
        reductions=1,
        given={"micro_steps": 2},
        without={"micro_steps": 4},
        exhaustive=True,
    ),
    Training(
        "Accelerate, `accumulate()`",
        "accelerated",
        ("accumulation",),
        heads,
        BOTH_RIGHT,
        LOSES,
        reductions=4,
        steps=2,
        **FOUR,
        **HEADS,
    ),
    TWO_LOSSES,
    Training(
        "TRL, DPO with LoRA",
        "preferences",
        ("dpo", Path("lm"), Path("dpo")),
        adapted,
        {3: RIGHT},
        {3: "Recomputed values for the following tensors have different metadata"},
        reductions=1,
        steps=2,
        without={"per_device_train_batch_size": 4},
        exhaustive=True,
    ),
    Training(
        "Lightning, two losses",
        "lit",
        (Path("lightning"),),
        lambda _: named(accelerated.SEED, accelerated.TwoHeads, "net."),
        {1: WRONG, 2: WRONG, 3: "size of tensor a (0)"},
        reductions=2,
        steps=8,
        batch=accelerated.BATCH,
        losses=0,
        unset=("gradient_accumulation_steps", "gradient_clipping"),
        exhaustive=True,
    ),
    GRADCACHE,
    # The discriminator is zeroed where PyTorch would zero it, after the generator's backward.
    Training(
        "a GAN",
        "engines",
        ("adversaries",),
        generator,
        {1: RIGHT, **TWICE},
        {1: RIGHT, **TWICE},
        old_fails=(3,),
        **LAYERS,
    ),
    # Nothing in it gets a gradient of the generator's loss, which passes through it.
    Training(
        "a GAN, frozen critic",
        "engines",
        ("adversaries",),
        generator,
        {1: RIGHT, **BOTH_RIGHT},
        {1: RIGHT, **BOTH_RIGHT},
        reductions=2,
        given={"freezes": True},
        **LAYERS,
    ),
]
