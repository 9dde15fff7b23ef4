"""ZeRO-3 without the optimizer's states loads the weights of the tag that was given."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import applied, engine_of, models
from tests.harness.trainers import Parameters, parameters
from tests.world import on_ranks

PATCH = "zero3_checkpoints"
WEIGHTS = {"load_optimizer_states": False}
MODULE = {"load_module_only": True}
pytestmark = pytest.mark.core_case


def model(value: float) -> torch.nn.Module:
    """Its weights are all this value, and its first is frozen."""
    module = models.build("TwoHeads")
    for param in module.parameters():
        param.data.fill_(value)
    next(module.parameters()).requires_grad_(False)
    return module


def saved(folder: Path, stage: int = 3) -> None:
    """Two checkpoints: of ones and twos; the file `latest` names the second."""
    for tag, value in {"ones": 1.0, "twos": 2.0}.items():
        engine_of(model(value), stage=stage).save_checkpoint(str(folder), tag=tag)


def are(weights: Parameters, value: float) -> bool:
    return all(bool((weight == value).all()) for weight in weights.values())


def loaded(folder: Path, *patches: str, stage: int = 3, **options: Any) -> Parameters:
    with applied(*patches):
        engine = engine_of(model(3.0), stage=stage)
        path, state = engine.load_checkpoint(str(folder), **options)
        assert path
        has_states = options.get("load_optimizer_states") is False
        assert stage < 3 or ("optimizer" in state) == has_states
        return parameters(engine.module)


@on_ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("way", [{}, WEIGHTS, MODULE, WEIGHTS | MODULE], ids=str)
def test_the_weights_of_the_tag(way: dict[str, bool], stage: int, tmp_path: Path) -> None:
    saved(tmp_path, stage)
    stock = loaded(tmp_path, stage=stage, tag="ones", **way)
    assert are(stock, 1.0) == (stage < 3 or not way), "stock is right"
    assert are(loaded(tmp_path, PATCH, stage=stage, tag="ones", **way), 1.0)
    assert are(loaded(tmp_path, PATCH, stage=stage, **way), 2.0)


@on_ranks
def test_without_the_file_latest(tmp_path: Path) -> None:
    engine = engine_of(model(1.0), stage=3)
    engine.save_checkpoint(str(tmp_path), tag="ones", save_latest=False)
    assert are(loaded(tmp_path, PATCH, tag="ones", **WEIGHTS), 1.0)


@on_ranks
def test_by_a_function_of_the_scripts_own(tmp_path: Path) -> None:
    saved(tmp_path)

    def load(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        dst.load_state_dict({name: weight * 4 for name, weight in src.items()})

    weights = loaded(tmp_path, PATCH, tag="ones", custom_load_fn=load, **MODULE)
    weights.pop(next(iter(weights)))  # frozen: DeepSpeed loads it once more, by itself
    assert are(weights, 4.0)
