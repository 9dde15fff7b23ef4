"""Three fates of a run of the autograd engine, and the runs inside it: plain PyTorch."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_patches.steps.graph_task import TaskWatch, current_task_id
from tests.harness.models import Boom, RaiseInBackward

armed = partial(mock.patch.object, RaiseInBackward, "armed")


class Watched:
    """Notes what a hook inside a backward has met, as `EngineSteps.enter_backward` asks."""

    def __init__(self) -> None:
        self.watch = TaskWatch()
        self.met: list[str] = []

    def at(self, tensor: Tensor) -> Tensor:
        tensor.register_hook(self.come)
        return tensor

    def come(self, grad: Tensor) -> None:
        if self.watch.task_id == current_task_id():
            self.met.append("own")
        elif self.watch.running:
            self.met.append("nested")
        else:
            self.met.append("after a failure" if self.watch.raised else "begins")
            if not self.watch.raised:
                self.watch.begin()

    def loss(self) -> Tensor:
        return self.at(RaiseInBackward.apply(ready()).sum())


def ready() -> Tensor:
    return torch.ones(2, requires_grad=True)


def test_a_failure_is_told_at_once_and_met_until_it_is_dealt_with() -> None:
    watched = Watched()
    with pytest.raises(Boom) as raised, armed(True):
        watched.loss().backward()
    assert raised.tb is not None, "which must not keep the graph task alive"
    assert (watched.watch.raised, watched.watch.running) == (True, False)
    watched.loss().backward()
    assert watched.met == ["begins", "after a failure"]
    watched.watch.clear_failure()
    assert not watched.watch.raised
    watched.loss().backward()
    assert watched.met[2:] == ["begins"]


@pytest.mark.parametrize("raises", [False, True])
def test_a_backward_in_a_hook_of_another_is_nested(raises: bool) -> None:
    """And no failure of the other, if it raised and was caught."""
    watched = Watched()
    total, inner = ready().sum(), watched.loss()

    def hook(grad: Tensor) -> None:
        with pytest.raises(Boom) if raises else nullcontext(), armed(raises):
            inner.backward()

    total.register_hook(hook)
    watched.at(total)
    watched.at(total * 2).backward()
    assert watched.met == ["begins", "nested", "own"]
    assert not watched.watch.running
    assert not watched.watch.raised
