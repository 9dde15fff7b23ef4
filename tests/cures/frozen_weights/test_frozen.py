"""Frozen weights in the fp32 weights that are made of a checkpoint of ZeRO 1."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import BF16, Given, Options, applied, build_engine, on_ranks

PATCH = "frozen_weights"


def engine_of(options: Given, frozen: str = "0") -> Any:
    """Tied and frozen weights, a buffer, one layer that trains."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.BatchNorm1d(4))
    model[2].weight = model[0].weight
    for layer in frozen:
        model[int(layer)].requires_grad_(False)
    options = Options(**options)
    return build_engine(model, options.config, options=options)


def saved(engine: Any, folder: Path, **how: Any) -> None:
    engine.save_checkpoint(str(folder), tag="here", **how)
    dist.barrier()


def missing_in(folder: Path, engine: Any) -> set[str]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return missing(engine, get_fp32_state_dict_from_zero_checkpoint(str(folder), "here"))


def missing(engine: Any, saved_weights: Any) -> set[str]:
    expected = engine.module.state_dict()
    for name in saved_weights:
        torch.testing.assert_close(saved_weights[name].float(), expected[name].float(), msg=name)
    return expected.keys() - saved_weights.keys()


@on_ranks
@pytest.mark.core_case(options={"stage": 1})
@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 1, **BF16}, {"stage": 2}], ids=str)
def test_they_are_there(tmp_path: Path, options: Given) -> None:
    engine = engine_of(options)
    saved(engine, tmp_path)
    names = {"0.weight", "0.bias", "2.weight"} if options["stage"] == 1 else set()
    assert missing_in(tmp_path, engine) == names
    size = (tmp_path / "here/mp_rank_00_model_states.pt").stat().st_size
    with applied(PATCH):
        saved(engine, tmp_path)
    assert not missing_in(tmp_path, engine)
    assert (tmp_path / "here/mp_rank_00_model_states.pt").stat().st_size < size + 4096
    assert not any("frozen_param" in name or "partition" in name for name in vars(engine))


@on_ranks
def test_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    engine = engine_of({"stage": 1})
    with applied(PATCH):
        saved(engine, tmp_path, exclude_frozen_parameters=True)
    assert "0.bias" in missing_in(tmp_path, engine)


@on_ranks
@pytest.mark.core_case(patch=True)
@pytest.mark.parametrize("patch", [False, True], ids=["stock", "patched"])
def test_more_is_frozen_when_it_is_loaded(tmp_path: Path, patch: bool) -> None:
    """Also without the patch: whoever saved with it."""
    first = engine_of({"stage": 1})
    with applied(PATCH):
        saved(first, tmp_path)
    second = engine_of({"stage": 1}, frozen="01")
    with torch.no_grad():
        for param in second.module.parameters():
            param.zero_()
    with applied(*[PATCH] * patch):
        _, client = second.load_checkpoint(str(tmp_path), "here", load_module_only=True)
    assert not missing(second, first.module.state_dict())
    assert (client.get("frozen_param_fragments") is None) == patch
