"""Gather before, release after, per graph task: in plain PyTorch, without DeepSpeed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_patches.runtime.graph_task import at_end_of_task
from ds_patches.zero3_retain.boundaries import ModuleBoundary, OpenCalls


class Model(nn.Module):
    """Modules whose boundaries write down what happens, in order."""

    transforms = True

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        self.events: list[str] = []
        self.version = 0  # of the parameters
        self.calls = OpenCalls(lambda task: at_end_of_task(partial(self.calls.end, task)))
        for name, module in modules.items():
            self.add_module(name, module)
            self._set_boundary(name, module)

    def _set_boundary(self, name: str, module: nn.Module) -> None:
        boundary = ModuleBoundary(
            gather=lambda: self.events.append(f"gather {name}"),
            release=lambda: self.events.append(f"release {name}"),
            calls=self.calls,
            version=lambda: self.version,
            transforms=self.transforms,
        )
        module.register_forward_pre_hook(lambda _, args: tuple(map(boundary.after.apply, args)))
        module.register_forward_hook(lambda _, args, out: boundary.before.apply(out))

    def take(self) -> list[str]:
        events, self.events[:] = list(self.events), []
        return events


@pytest.fixture(autouse=True, params=[True, False], ids=["transforms", "none"])
def transforms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """In both forms that the Functions may have."""
    monkeypatch.setattr(Model, "transforms", request.param)
    return bool(request.param)


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def ready() -> Tensor:
    return torch.ones(2, 3, requires_grad=True)


class Named(nn.Module):
    def forward(self, *, x: Tensor) -> Tensor:
        return 2 * x


def test_a_call_whose_arguments_have_names_is_of_its_own_step() -> None:
    model = Model(named=Named())
    old = model.named(x=ready())
    model.version += 1
    new = model.named(x=ready())
    new.sum().backward()
    assert model.take() == ["gather named", "release named"]
    with pytest.raises(RuntimeError, match=r"from before engine\.step\(\)"):
        old.sum().backward()


def test_every_backward_gathers_and_releases() -> None:
    model = Model(first=nn.Linear(3, 3), second=nn.Linear(3, 3))
    out = model.second(model.first(ready())).sum()
    once = ["gather second", "release second", "gather first", "release first"]
    for _ in range(3):
        out.backward(retain_graph=True)
        assert model.take() == once
        assert len(model.calls) == 0


def test_first_layer_is_released_at_the_end_of_each_backward() -> None:
    model = Model(first=nn.Linear(3, 3), second=nn.Linear(3, 3))
    out = model.second(model.first(torch.ones(2, 3))).sum()
    for _ in range(2):
        out.backward(retain_graph=True)
        assert model.take()[-2:] == ["gather first", "release first"]


def test_module_with_two_inputs_awaits_both() -> None:
    model = Model(left=nn.Linear(3, 3), right=nn.Linear(3, 3), join=Sum())
    model.join(model.left(ready()), model.right(ready())).sum().backward()
    events = model.take()
    assert events[:2] == ["gather join", "release join"]
    assert sorted(events[2:]) == sorted(
        ["gather left", "release left", "gather right", "release right"]
    )


def test_repeated_calls_in_a_row_gather_each_time() -> None:
    model = Model(shared=nn.Linear(3, 3))
    out = model.shared(model.shared(ready())).sum()
    for _ in range(2):
        out.backward(retain_graph=True)
        assert model.take() == ["gather shared", "release shared"] * 2


def test_interleaved_calls_release_after_the_last() -> None:
    """Both calls' outputs are reached before either's input is."""
    model = Model(shared=nn.Linear(3, 3))
    (model.shared(ready()) * model.shared(ready())).sum().backward()
    events = model.take()
    assert events.count("gather shared") == 2
    assert events[-1] == "release shared"
    assert len(model.calls) == 0


def test_loss_on_a_part_leaves_the_rest_alone() -> None:
    model = Model(trunk=nn.Linear(3, 3), head=nn.Linear(3, 1), other=nn.Linear(3, 1))
    features = model.trunk(ready())
    first, second = model.head(features).sum(), model.other(features).sum()
    first.backward(retain_graph=True)
    assert not any("other" in event for event in model.take())
    second.backward()
    assert not any("head" in event for event in model.take())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_modules_are_released_every_time(use_reentrant: bool) -> None:
    model = Model(inner=nn.Linear(3, 3), outer=nn.Linear(3, 3))
    recomputed = checkpoint(model.inner, ready(), use_reentrant=use_reentrant)
    out = model.outer(recomputed).sum()
    for _ in range(2):
        out.backward(retain_graph=True)
        events = model.take()
        assert events.count("gather inner") == events.count("release inner") == 1
        assert len(model.calls) == 0


def test_recomputation_that_stops_early_makes_a_call_of_its_own() -> None:
    """The last module's outputs are not seen again; its next forward is another call all the same.

    Else every block under checkpointing would be taken for one that is still needed.
    """
    model = Model(inner=nn.Linear(3, 3), outer=nn.Linear(3, 3))
    steps = []
    for _ in range(3):
        recomputed = checkpoint(model.inner, ready(), use_reentrant=False)
        model.outer(recomputed).sum().backward()
        steps.append(model.take())
        assert len(model.calls) == 0
    assert steps == [["gather outer", "release outer", "gather inner", "release inner"]] * 3


def test_a_backward_with_a_graph_has_a_backward_that_gathers() -> None:
    model = Model(first=nn.Linear(3, 3), second=nn.Linear(3, 3))
    x = ready()
    out = model.second(model.first(x).tanh()).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    once = ["gather second", "release second", "gather first", "release first"]
    assert model.take() == once
    slope.square().sum().backward()
    events = model.take()
    for name in ("first", "second"):
        assert events.index(f"gather {name}") < events.index(f"release {name}")
        assert events.count(f"gather {name}") >= events.count(f"release {name}")
    assert len(model.calls) == 0


def test_transforms_pass_where_they_may(transforms: bool) -> None:
    model = Model(layer=nn.Linear(3, 1))

    def loss(x: Tensor) -> Tensor:
        return model.layer(x).sum()

    if transforms:
        gradient = torch.func.grad(loss)(torch.ones(2, 3))
        assert torch.equal(gradient, model.layer.weight.expand(2, 3))
    else:
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(loss)(torch.ones(2, 3))
