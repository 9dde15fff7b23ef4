"""Which recomputation a module's hook finds itself in: plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_patches.runtime import graph_task


@pytest.mark.core_case(reentrant=False, says=False)
@pytest.mark.core_case(reentrant=True, says=False)
@pytest.mark.parametrize("says", [True, False], ids=["torch 2.8", "torch 2.7"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_backward(monkeypatch: pytest.MonkeyPatch, reentrant: bool, says: bool) -> None:
    if not says:
        monkeypatch.setattr(graph_task, "top_saved_tensors_hooks", None)
    layer, found = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), []

    def ran(*_: object) -> None:
        if graph_task.current_task_id() != graph_task.NO_TASK:
            found.append(graph_task.recomputes_for_hooks())

    layer[0].register_forward_hook(ran)
    x = torch.ones(1, 2, requires_grad=True)
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert found == [not reentrant]
