"""Hooks for saved tensors that stay out of compiled graphs."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_patches.dc_fallback.dynamo import SavedTensorsHooks
from ds_patches.steps import graph_task
from tests.harness.models import Boom


class Seen:
    """Hooks, and how many tensors they were given."""

    def __init__(self) -> None:
        self.packed = 0
        self.hooks = SavedTensorsHooks(self.pack, lambda saved: saved)

    def pack(self, tensor: Tensor) -> Tensor:
        self.packed += 1
        return tensor


def refused(x: Tensor) -> Tensor:
    x.exp()  # saves one tensor
    raise Boom("in a graph")


@pytest.mark.parametrize(
    ("entered", "packed", "afterwards"),
    [
        ("", (0, 0), (0, 0)),
        ("ours", (0, 0), (1, 0)),
        ("ours others", (0, 1), (0, 2)),  # others within them are left as they are
        ("others ours", (0, 1), (1, 1)),  # others around them are the graph's
    ],
)
def test_a_graph_runs_without_the_hooks(entered: str, packed: Any, afterwards: Any) -> None:
    """Also one that raises."""
    seen, x = {"ours": Seen(), "others": Seen()}, torch.ones(3, requires_grad=True)
    with ExitStack() as inside:
        for name in entered.split():
            inside.enter_context(seen[name].hooks)
        with pytest.raises(Boom):
            seen["ours"].hooks.run_without(refused, (x,))
        assert tuple(hooks.packed for hooks in seen.values()) == packed
        x.exp()
        assert tuple(hooks.packed for hooks in seen.values()) == afterwards
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_an_older_torch_is_refused_where_it_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_task, "top_saved_tensors_hooks", None)
    seen, x = Seen(), torch.ones(3, requires_grad=True)
    with seen.hooks, pytest.raises(NotImplementedError, match=r"torch 2\.8"):
        seen.hooks.run_without(torch.exp, (x,))
    assert torch.equal(seen.hooks.run_without(torch.exp, (x,)), x.exp())
