"""A run of the autograd engine that raised, as code inside it has seen it: plain PyTorch."""

from unittest import mock

import pytest
import torch

from ds_patches.steps.graph_task import TaskWatch
from tests.harness.models import Boom, RaiseInBackward


def test_a_failure_is_known_until_it_is_cleared() -> None:
    watch = TaskWatch()
    loss = RaiseInBackward.apply(torch.ones(2, requires_grad=True)).sum()
    loss.register_hook(lambda grad: watch.begin())
    with pytest.raises(Boom) as raised, mock.patch.object(RaiseInBackward, "armed", True):
        loss.backward()
    assert raised.tb is not None, "which must not keep the graph task alive"
    assert (watch.raised, watch.running) == (True, False)
    watch.clear_failure()
    assert not watch.raised
