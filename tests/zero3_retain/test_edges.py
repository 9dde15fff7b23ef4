"""Gather before, release after, per graph task: in plain PyTorch, without DeepSpeed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ds_patches.zero3_retain.gathers import GatheredModule, Gathers


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Model(nn.Module):
    """Modules whose boundaries write down what they gather (+) and release (-), in order."""

    def __init__(self, transforms: bool) -> None:
        super().__init__()
        self.events: list[str] = []
        self.gathers = Gathers(offload=None, version=lambda: 0)
        self.one, self.two, self.join = nn.Linear(3, 3), nn.Linear(3, 3), Sum()
        for name, module in self.named_children():
            gathered: Any = GatheredModule(self.gathers, module, transforms)
            gathered.unshard = partial(self.events.append, f"+{name}")
            gathered.reshard = partial(self.events.append, f"-{name}")
            into, out_of = gathered.at_inputs.apply, gathered.at_outputs.apply
            module.register_forward_pre_hook(lambda _, args, into=into: tuple(map(into, args)))
            module.register_forward_hook(lambda _, args, out, out_of=out_of: out_of(out))

    def take(self) -> str:
        """Return the events since the last call; every call of a module has been closed."""
        assert not any(self.gathers._open_calls.values())
        events, self.events[:] = " ".join(self.events), []
        return events


@pytest.fixture(params=[True, False], ids=["transforms", "none"])
def model(request: pytest.FixtureRequest) -> Model:
    """In both forms that the Functions may have."""
    return Model(transforms=request.param)


def ready() -> Tensor:
    return torch.ones(2, 3, requires_grad=True)


def recomputed(model: Model, reentrant: bool) -> Tensor:
    """One that stops early makes a call of its own, whose outputs are not seen.

    Else every block under checkpointing would be taken for one that is still needed.
    """
    return model.two(checkpoint(model.one, ready(), use_reentrant=reentrant))


def recomputed_to_its_end(model: Model) -> Tensor:
    """The end of a module's forward releases it, as if no backward were in need of it."""
    with set_checkpoint_early_stop(False):
        return checkpoint(lambda x: model.two(model.one(x)), ready(), use_reentrant=False)


@pytest.mark.parametrize(
    ("forward", "events"),
    [
        (lambda model: model.two(model.one(ready())), "+two -two +one -one"),
        # A first layer, whose input needs no gradient, is released at the end.
        (lambda model: model.two(model.one(torch.ones(2, 3))), "+two -two +one -one"),
        (lambda model: model.one(model.one(ready())), "+one -one +one -one"),
        # One whose input needs no gradient is open while another call begins and ends.
        (lambda model: model.one(ready()) * model.one(torch.ones(2, 3)), "+one +one -one"),
        # Both inputs are awaited.
        (
            lambda model: model.join(model.one(ready()), model.two(ready())),
            "+join -join +two -two +one -one",
        ),
        (partial(recomputed, reentrant=True), "+two -two +one -one"),
        (partial(recomputed, reentrant=False), "+two -two +one -one"),
        (recomputed_to_its_end, "+two +two -two +one -one"),
    ],
)
def test_every_backward_gathers_and_releases(
    model: Model, forward: Callable[[Model], Tensor], events: str
) -> None:
    for _ in range(2):
        loss = forward(model).sum()
        for retain_graph in (True, True, False):
            loss.backward(retain_graph=retain_graph)
            assert model.take() == events


@pytest.mark.parametrize("transforms", [True, False])
def test_transforms_pass_where_they_may(transforms: bool) -> None:
    model = Model(transforms)
    gradient = torch.func.grad(lambda x: model.one(x).sum())
    if transforms:
        expected = model.one.weight.sum(0).expand(2, 3)
        torch.testing.assert_close(gradient(torch.ones(2, 3)), expected)
    else:
        with pytest.raises(RuntimeError, match="setup_context"):
            gradient(torch.ones(2, 3))


def test_a_backward_with_a_graph_has_a_backward_that_gathers(model: Model) -> None:
    x = ready()
    out = model.two(model.one(x).tanh()).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    assert model.take() == "+two -two +one -one"
    slope.square().sum().backward()
    events = model.take().split()
    for name in ("one", "two"):
        assert events.index(f"+{name}") < events.index(f"-{name}")
        assert events.count(f"+{name}") >= events.count(f"-{name}")
