"""Functions of parameters that are computed in a ``GatheredParameters``, and their backwards."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_patches.core.errors import Refused
from tests.harness import World, applied, checked, engine_trainer, of, on_ranks, run
from tests.harness.models import loss_of
from tests.harness.options import BF16, OFFLOADED, OFFLOADED_ALL, PERSISTENT, Options


def means(weights: list[Tensor]) -> Tensor:
    """Of which a graph saves nothing."""
    return torch.stack([one.mean() for one in weights]).sum()


def squares(weights: list[Tensor]) -> Tensor:
    """Weight decay in the loss."""
    return torch.stack([(one**2).sum() for one in weights]).sum()


def norms(weights: list[Tensor]) -> Tensor:
    return torch.stack([one.norm() + one.abs().mean() for one in weights]).sum()


def orthogonality(weights: list[Tensor]) -> Tensor:
    return torch.stack(
        [(one.t() @ one - 1).pow(2).mean() for one in weights if one.dim() > 1]
    ).sum()


def spectral(weights: list[Tensor]) -> Tensor:
    return torch.stack(
        [torch.linalg.matrix_norm(one.float(), 2) for one in weights if one.dim() > 1]
    ).sum()


def old(weights: list[Tensor]) -> Tensor:
    """Elastic weight consolidation."""
    return torch.stack([(0.5 * (one - 0.1) * (one - 0.1)).sum() for one in weights]).sum()


def penalised(trainer: Any, *, function: Any = squares, where: str = "before") -> None:
    """where: when the block is: before the forward; around that or the backward; around both."""
    params = [*trainer.module.parameters()]
    for step in trainer.steps():
        for micro in range(trainer.options.micro_steps):
            if where == "before":
                with trainer.gathered(params):
                    penalty = function(params)
                trainer.backward(loss_of(trainer, step, micro) + 0.1 * penalty)
            elif where == "after":
                loss = loss_of(trainer, step, micro)
                with trainer.gathered(params):
                    penalty = function(params)
                trainer.backward(loss, retain_graph=True)
                trainer.backward(0.1 * penalty)
            elif where == "forward":
                with trainer.gathered(params):
                    loss = loss_of(trainer, step, micro)
                    penalty = function(params)
                trainer.backward(loss + 0.1 * penalty)
            else:
                with trainer.gathered(params):
                    loss = loss_of(trainer, step, micro) + 0.1 * function(params)
                    trainer.backward(loss, retain_graph=True)
                    trainer.backward(loss)
            trainer.step()


FUNCTIONS = [means, squares, norms, orthogonality, spectral, old]
PLACES = ["before", "after", "forward", "both"]


def rows(**options: Any) -> Any:
    for function in FUNCTIONS:
        for where in PLACES:
            script = partial(penalised, function=function, where=where)
            yield of("zero3_retain", script, 3, **options)


SQUARES = [partial(penalised, where=where) for where in PLACES]


test_penalties = checked(
    *rows(),
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
@pytest.mark.parametrize("where", PLACES[:3])
def test_stock_fails(world: World, where: str) -> None:
    for one in world.run(run, partial(penalised, where=where), Options(3)):
        assert one.error


def penalty_of(trainer: Any) -> Tensor:
    params = [*trainer.module.parameters()]
    with trainer.gathered(params):
        return squares(params)


@on_ranks
def test_a_backward_after_the_step_is_refused() -> None:
    with applied("zero3_retain"):
        trainer = engine_trainer(stage=3)
        penalty = penalty_of(trainer)
        trainer.backward(loss_of(trainer, 0) + penalty, retain_graph=True)
        trainer.step()
        with pytest.raises(Refused, match="Compute it again"):
            trainer.backward(penalty)


@on_ranks
def test_parameters_that_were_written_to_are_no_longer_those() -> None:
    from deepspeed.runtime.zero import GatheredParameters

    with applied("zero3_retain"):
        trainer = engine_trainer(stage=3)
        penalty = penalty_of(trainer)
        with GatheredParameters(params := [*trainer.module.parameters()], 0), torch.no_grad():
            for param in params:
                param.mul_(0.5)
        with pytest.raises(RuntimeError):
            trainer.backward(loss_of(trainer, 0) + penalty)


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
