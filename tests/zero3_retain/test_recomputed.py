"""Checkpointing: what a recomputation sees of frozen parameters, and leaves gathered."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_patches.steps import graph_task
from tests.harness import SMALL_PREFETCH, Outcome, World, check, on_ranks, run, stock, streams
from tests.harness.models import build
from tests.scripts import adapters
from tests.scripts.worlds import FRUGAL


@pytest.mark.core_case(settings=FRUGAL)
@pytest.mark.parametrize("settings", [FRUGAL, SMALL_PREFETCH, {}], ids=str)
def test_a_recomputation_sees_what_the_forward_saw(world: World, settings: dict[str, Any]) -> None:
    script = adapters.low_rank_recomputed
    options = script.at(3, steps=3, zero=settings)
    for outcome in world.run(run, script, options):
        assert ("Recomputed values for" in outcome.error) == stock.LOSES_FROZEN, outcome
    check(world, script, options, "zero3_retain")


def looked_at(model: str, *patches: str) -> Outcome:
    options = replace(adapters.low_rank.at(3, steps=3), model=model, zero=FRUGAL)
    return run(adapters.low_rank, options, *patches, looks=["memory"], strict=False)


@on_ranks
@pytest.mark.core_case(model="DeepReentrantAdapted")
@pytest.mark.parametrize(
    "model", [pytest.param("DeepAdapted", marks=pytest.mark.exhaustive), "DeepReentrantAdapted"]
)
def test_one_block_is_gathered_at_a_time(model: str) -> None:
    built: Any = build(model)  # beside the block the embedding is in use, which is the largest
    most = sum(p.numel() for part in (built.blocks[0], built.embed) for p in part.parameters())
    if model == "DeepReentrantAdapted" and not stock.LOSES_FROZEN:
        # Reentrant recomputation holds all that is frozen.
        assert max(looked_at(model).peaks) > 3 * most, "stock is right"
    outcome = looked_at(model, "zero3_retain")
    assert outcome.equal, outcome
    assert max(outcome.peaks) <= most
    assert not any(outcome.available)


@pytest.mark.core_case
def test_a_module_may_hand_out_what_another_has(world: World) -> None:
    """As PEFT's ``modules_to_save``: stock takes the other's counters for its own."""
    options = adapters.modules_to_save.at(3, steps=3)
    for outcome in world.run(run, adapters.modules_to_save, options):
        is_taken = "has no attribute 'ds_grads_remaining'" in outcome.error
        assert is_taken == stock.TAKES_COUNTERS, outcome
    check(world, adapters.modules_to_save, options, "zero3_retain")


@pytest.mark.core_case(reentrant=False, says=False)
@pytest.mark.core_case(reentrant=True, says=False)
@pytest.mark.parametrize("says", [True, False], ids=["torch 2.8", "torch 2.7"])
@pytest.mark.parametrize("own", [False, True], ids=["torch's", "deepspeed's"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_which_recomputation_a_hook_finds_itself_in(
    monkeypatch: pytest.MonkeyPatch, reentrant: bool, own: bool, says: bool
) -> None:
    from deepspeed import checkpointing

    if not says:
        monkeypatch.setattr(graph_task, "top_saved_tensors_hooks", None)
    layer, answers = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), []

    def ran(*_: object) -> None:
        if graph_task.current_task_id() != graph_task.NO_TASK:
            answers.append(graph_task.is_recomputing())

    layer[0].register_forward_hook(ran)
    x = torch.ones(1, 2, requires_grad=True)
    with streams():
        if own:
            name = "checkpoint" if reentrant else "non_reentrant_checkpoint"
            output = getattr(checkpointing, name)(layer, x)
        else:
            output = checkpoint(layer, x, use_reentrant=reentrant)
        output.sum().backward()
    assert answers == [not reentrant]
