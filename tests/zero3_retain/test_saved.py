"""Functions of parameters that are computed in a ``GatheredParameters``, and their backwards."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from ds_patches.core.errors import Refused
from tests.harness import World, applied, checked, engine_trainer, of, on_ranks, run
from tests.harness.models import batch, loss_of
from tests.harness.options import BF16, OFFLOADED, OFFLOADED_ALL, PERSISTENT, Options
from tests.harness.views import VIEWS


def means(weights: list[Tensor]) -> Tensor:
    """A sum of means, of which a graph saves nothing."""
    return torch.stack([weight.mean() for weight in weights]).sum()


def squares(weights: list[Tensor]) -> Tensor:
    """Weight decay in the loss."""
    return torch.stack([(weight**2).sum() for weight in weights]).sum()


def penalised(
    trainer: Any, step: int, micro: int, *, function: Any = squares, place: str = "before"
) -> None:
    """place: when the block is: before the forward; around that or the backward; around both."""
    params = [*trainer.module.parameters()]
    if place == "before":
        with trainer.gathered(params):
            penalty = function(params)
        trainer.backward(loss_of(trainer, step, micro) + 0.1 * penalty)
    elif place == "after":
        loss = loss_of(trainer, step, micro)
        with trainer.gathered(params):
            penalty = function(params)
        trainer.backward(loss, retain_graph=True)
        trainer.backward(0.1 * penalty)
    elif place == "forward":
        with trainer.gathered(params):
            loss = loss_of(trainer, step, micro)
            penalty = function(params)
        trainer.backward(loss + 0.1 * penalty)
    else:
        with trainer.gathered(params):
            loss = loss_of(trainer, step, micro) + 0.1 * function(params)
            trainer.backward(loss, retain_graph=True)
            trainer.backward(loss)


PLACES = ["before", "after", "forward", "both"]
SQUARES = [partial(penalised, place=place) for place in PLACES]


test_penalties = checked(
    *(
        of("zero3_retain", partial(penalised, function=function, place=place), 3)
        for function in (means, squares)
        for place in PLACES
    ),
    *(
        of("zero3_retain", script, 3, core={3} if more == BF16 else (), **more)
        for script in SQUARES
        for more in (
            BF16,
            {"micro_steps": 2},
            OFFLOADED,
            {**OFFLOADED_ALL, "zero": PERSISTENT},
            {"model": "SharedBlock"},
            {"model": "TiedEmbedding"},
            {"model": "NonReentrant"},
        )
    ),
)


@pytest.mark.core_case
def test_stock_fails(world: World) -> None:
    for outcome in world.run(run, penalised, Options(3)):
        assert outcome.error


def of_views(trainer: Any, step: int, *, place: str) -> None:
    """A step for each kind of view; an earlier block of the step has read the weight."""
    weight, function = trainer.module.rebuild.weight, [*VIEWS.values()][step]
    with trainer.gathered([weight]):
        weight.sum()
    with trainer.gathered([weight]):
        penalty = 0.05 * function(weight).sum()
        if place != "after":
            trainer.backward(penalty, retain_graph=place != "within")
        if place == "within, twice":
            trainer.backward(penalty)
    if place == "within and after":
        trainer.backward(penalty)
    elif place == "after":
        trainer.backward(penalty, retain_graph=True)
        with trainer.gathered([weight]):
            trainer.backward(penalty)


test_saved_views = checked(
    *(
        of("zero3_retain", partial(of_views, place=place), 3, core={3}, steps=len(VIEWS))
        for place in ("within", "within, twice", "within and after", "after")
    )
)


def in_chunks(trainer: Any, step: int, micro: int, *, depth: int = 1, again: bool = False) -> None:
    """As TRL has it: each chunk is recomputed (`use_reentrant=True`), with the weights gathered.

    depth: of the checkpoints. again: a later block of the chunk has weights of an earlier one.
    """
    weight, bias = trainer.module.rebuild.weight, trainer.module.rebuild.bias

    def chunk(hidden: Tensor) -> Tensor:
        with trainer.gathered([weight]):
            projected = linear(hidden, weight) + weight.square().mean()
        with trainer.gathered([bias, *[weight] * again]):
            return (projected * bias.cos()).square().mean() + again * weight.square().mean()

    def recomputed(hidden: Tensor, levels: int) -> Tensor:
        if not levels:
            return chunk(hidden)
        return checkpoint(recomputed, hidden.sin(), levels - 1, use_reentrant=True)

    _, rebuilt = trainer(batch(step, micro)[0])
    trainer.backward(sum(recomputed(part, depth) for part in rebuilt.chunk(2)))


def twice_in_chunks(trainer: Any, step: int, micro: int) -> None:
    """Two backwards over the graph of the chunks: each recomputes them."""
    weight = trainer.module.rebuild.weight

    def chunk(hidden: Tensor) -> Tensor:
        with trainer.gathered([weight]):
            return linear(hidden, weight).square().mean() + weight.square().mean()

    _, rebuilt = trainer(batch(step, micro)[0])
    loss = sum(checkpoint(chunk, part, use_reentrant=True) for part in rebuilt.chunk(2))
    trainer.backward(loss, retain_graph=True)
    trainer.backward(0.5 * loss)


test_reentrant_checkpoints = checked(
    of("zero3_retain", in_chunks, 3, core={3}),
    *(of("zero3_retain", in_chunks, 3, **more) for more in ({"micro_steps": 2}, OFFLOADED)),
    of("zero3_retain", partial(in_chunks, depth=2), 3),
    of("zero3_retain", partial(in_chunks, again=True), 3),
    of("zero3_retain", twice_in_chunks, 3),
)


def penalty_of(trainer: Any) -> Tensor:
    params = [*trainer.module.parameters()]
    with trainer.gathered(params):
        return squares(params)


def halve(trainer: Any) -> None:
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(params := [*trainer.module.parameters()], 0), torch.no_grad():
        for param in params:
            param.mul_(0.5)


@on_ranks
def test_parameters_that_were_written_to_are_no_longer_those() -> None:
    with applied("zero3_retain"):
        trainer = engine_trainer(stage=3)
        penalty = penalty_of(trainer)
        halve(trainer)
        with pytest.raises(RuntimeError):
            trainer.backward(loss_of(trainer, 0) + penalty)


def step(trainer: Any) -> None:
    trainer.step()


@on_ranks
@pytest.mark.parametrize("change", [step, halve])
def test_nor_are_they_between_two_backwards(change: Callable[[Any], None]) -> None:
    """The first has told the graph place they are."""
    with applied("zero3_retain"):
        trainer = engine_trainer(stage=3)
        penalty = penalty_of(trainer)
        trainer.backward(loss_of(trainer, 0) + penalty, retain_graph=True)
        change(trainer)
        with pytest.raises(Refused, match="Compute it again"):
            trainer.backward(penalty)


@on_ranks
def test_taken_back_in_a_block() -> None:
    """Stock finds the parameters as it left them."""
    trainer = engine_trainer(stage=3)
    with applied("zero3_retain"):
        trainer.backward(loss_of(trainer, 0))
        trainer.step()
        block = trainer.gathered(trainer.module.parameters())
        block.__enter__()
    block.__exit__(None, None, None)
    assert not any(param.ds_status.name == "AVAILABLE" for param in trainer.module.parameters())


@on_ranks
def test_a_forward_leaves_a_block_whole() -> None:
    """And after it all is partitioned."""
    with applied("zero3_retain"):
        trainer = engine_trainer(stage=3)
        params = [*trainer.module.parameters()]
        for step in range(3):
            with trainer.gathered(params), torch.no_grad():
                loss_of(trainer, step)
                assert all(param.shape == param.ds_shape for param in params)
            assert not any(param.numel() for param in params)
