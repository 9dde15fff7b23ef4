"""Tensors that a checkpoint saves, and for how long: without ranks and engines."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_patches.steps.graph_task import top_saved_tensors_hooks
from tests.activation_checkpointing.recomputing import NON_REENTRANT, REENTRANT, plainly
from tests.harness import applied, stock, streams

FUNCTIONS = pytest.mark.parametrize("by", [REENTRANT, NON_REENTRANT])
SHAPE = (7, 13)
INPUT = (5, 13)
weight = torch.linspace(-1, 1, 13 * 13).view(13, 13).requires_grad_()


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    import deepspeed  # noqa: F401

    with streams(), applied("activation_checkpointing"):
        yield


def function(by: str) -> Any:
    from deepspeed import checkpointing

    return getattr(checkpointing, by)


def alive(shape: tuple[int, ...]) -> int:
    """How many tensors of this shape there are, without a collection of garbage."""
    return sum(type(tensor) is Tensor and tensor.shape == shape for tensor in gc.get_objects())


def widened(x: Tensor) -> Tensor:
    """Its activations are of a shape that nothing else has."""
    return (torch.ones(7, 5) @ x @ weight).sigmoid().tanh().exp().sum(0)


def grads_of(loss: Tensor, retain_graph: bool, **more: Any) -> Tensor:
    weight.grad = None
    loss.backward(retain_graph=retain_graph, **more)
    grad = weight.grad
    assert grad is not None
    weight.grad = None
    return grad


@pytest.fixture
def no_collection() -> Iterator[None]:
    function(REENTRANT)(widened, torch.ones(INPUT))  # the first call imports, and keeps its frames
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def activation() -> Tensor:
    """Which a checkpoint alone saves."""
    return torch.ones(1, requires_grad=True).expand(INPUT) * 1


@pytest.mark.usefixtures("no_collection")
@pytest.mark.core_case
@FUNCTIONS
def test_nothing_recomputed_stays_after_a_backward_that_retains_its_graph(by: str) -> None:
    if by == NON_REENTRANT and top_saved_tensors_hooks is None:
        pytest.skip("up to torch 2.7 it stays")
    grads_of(function(by)(widened, activation()).sum(), False)
    assert (alive(INPUT), alive(SHAPE)) == (0, 0), "nor after one that does not"
    loss = function(by)(widened, activation()).sum()
    assert (alive(INPUT), alive(SHAPE)) == (1, 0)
    first = grads_of(loss, True)
    assert (alive(INPUT), alive(SHAPE)) == (1, 0)
    assert grads_of(loss, True).equal(first)
    assert (alive(INPUT), alive(SHAPE)) == (1, 0)
    assert grads_of(loss, False).equal(first)
    assert (alive(INPUT), alive(SHAPE)) == (0, 0), "given up with the graph; the loss is here"


@pytest.mark.core_case
@FUNCTIONS
def test_a_tracked_generator_gives_the_same_numbers_each_time(by: str) -> None:
    """Also after a recomputation that raises."""
    from deepspeed import checkpointing

    raises = False
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.add("here", 5)
    try:

        def dropping(x: Tensor) -> Tensor:
            with tracker.fork("here"):
                dropped = torch.nn.functional.dropout(x @ weight, 0.5)
            if raises:
                raise ArithmeticError("as it was told to")
            return dropped

        loss = function(by)(dropping, torch.ones(INPUT, requires_grad=True)).square().sum()
        first = grads_of(loss, True)
        for retain_graph in (True, False):
            raises = True
            with pytest.raises(ArithmeticError):
                loss.backward(retain_graph=True)
            raises = False
            assert grads_of(loss, retain_graph).equal(first)
    finally:
        tracker.reset()


@FUNCTIONS
def test_one_checkpoint_in_another(by: str) -> None:
    def losses(recompute: Any) -> Tensor:
        def outer(x: Tensor, scale: float) -> tuple[Tensor, str, Tensor]:
            inner = recompute(lambda y: (y @ weight).tanh(), x)
            return inner * scale, "a text", inner.exp()

        scaled, _, grown = recompute(outer, torch.ones(INPUT, requires_grad=True), 0.5)
        return torch.stack([scaled.sum(), grown.sum(), (scaled * grown).sum()])

    for loss, plain in zip(losses(function(by)), losses(plainly), strict=True):
        assert grads_of(loss, True).allclose(grads_of(plain, True))


def test_a_gradient_of_a_gradient() -> None:
    """PyTorch allows it where nothing is reentrant."""

    def penalty(recompute: Any) -> Tensor:
        x = torch.linspace(0, 1, 65).view(INPUT).requires_grad_()
        recompute(lambda y: (y @ weight).tanh().square(), x).sum().backward(create_graph=True)
        assert x.grad is not None
        return grads_of(x.grad.square().sum(), False)

    assert penalty(function(NON_REENTRANT)).allclose(penalty(plainly))


class InBackground:
    """In place of what copies activations from a GPU: each copy is handed out once."""

    def __init__(self) -> None:
        self.copies: dict[int, Tensor] = {}

    def offload_input(self, tensor: Tensor) -> int:
        self.copies[id(tensor)] = tensor.clone()
        return id(tensor)

    def restore_input(self, token: int) -> Tensor:
        return self.copies.pop(token)

    def reset(self) -> None:
        self.copies.clear()


@stock.since("0.19.6", "copying in the background")
@FUNCTIONS
def test_activations_that_were_copied_in_the_background(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed import checkpointing

    copies = InBackground()
    monkeypatch.setattr(checkpointing, "CPU_CHECKPOINT", True)
    monkeypatch.setattr(checkpointing, "_get_cpu_offload_engine", lambda: copies)
    wanted = grads_of(widened(activation()).sum(), False)
    loss = function(by)(widened, activation()).sum()
    assert copies.copies
    for retain_graph in (True, True, False):
        assert grads_of(loss, retain_graph).allclose(wanted)
        assert not copies.copies


@FUNCTIONS
def test_arguments_by_name_and_no_gradient(by: str) -> None:
    x = torch.ones(INPUT)
    with torch.no_grad():
        assert not function(by)(widened, x).requires_grad
    assert function(by)(function=lambda: weight * 2).equal(weight * 2)
