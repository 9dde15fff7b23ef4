"""What is relied on in TorchDynamo, and in autograd's hooks for saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from ds_patches.dc_fallback import dynamo
from ds_patches.dc_fallback.dynamo import SavedTensorsHooks
from ds_patches.runtime import graph_task

COMPILED, EAGER = 1.0, 2.0


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs what it gets, and counts it. `boxed`: as AOTAutograd wants it."""

    def __init__(self, boxed: bool = False) -> None:
        self.graphs, self.boxed = 0, boxed

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return make_boxed_func(gm.forward) if self.boxed else gm.forward


def asking() -> Callable[[Tensor], Tensor]:
    """A function of its own code: what Dynamo knows of one stays with its code."""

    def ask(x: Tensor) -> Tensor:
        return x + COMPILED if torch.compiler.is_compiling() else x + EAGER

    ask.__code__ = ask.__code__.replace()
    return ask


def told_in_a_skipped_frame(ask: Callable[[Tensor], Tensor]) -> float:
    def loop(x: Tensor) -> Tensor:
        for _ in range(1):
            torch._dynamo.graph_break()
            x = ask(x)
        return x

    return float(torch.compile(loop, backend=Counting())(torch.zeros(())))


def told_in_a_compiled_frame(ask: Callable[[Tensor], Tensor]) -> float:
    backend = Counting()
    whole = torch.compile(lambda x: ask(x), backend=backend, fullgraph=True)
    told = float(whole(torch.zeros(())))
    assert backend.graphs == 1
    return told


# --- leave_alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "told"),
    [
        ("skipped", [COMPILED]),  # why there is `leave_alone`
        ("leave_alone skipped", [EAGER]),
        ("skipped leave_alone skipped", [COMPILED, EAGER]),
        ("leave_alone compiled skipped", [COMPILED, EAGER]),  # in a compiled frame it is traced
        # A reset forgets it for functions that had been compiled, and only for those.
        (
            "skipped leave_alone reset skipped reset leave_alone skipped",
            [COMPILED, COMPILED, EAGER],
        ),
        ("leave_alone skipped look_again skipped", [EAGER, COMPILED]),
    ],
)
def test_left_alone_a_function_runs_eagerly(story: str, told: list[float]) -> None:
    """What it is told, in each frame that calls it."""
    ask = asking()
    calls: dict[str, Callable[..., Any]] = {
        "skipped": told_in_a_skipped_frame,
        "compiled": told_in_a_compiled_frame,
        "leave_alone": dynamo.leave_alone,
        "look_again": dynamo.look_again,
        "reset": lambda _: torch._dynamo.reset(),
    }
    found = [calls[word](ask) for word in story.split()]
    assert [one for one in found if type(one) is float] == told


def test_disabled_nothing_that_it_calls_is_compiled() -> None:
    ask = asking()

    def calls(x: Tensor) -> Tensor:
        return ask(x)

    assert told_in_a_skipped_frame(dynamo.disabled(calls)) == EAGER
    dynamo.leave_alone(calls)
    assert told_in_a_skipped_frame(calls) == COMPILED


def test_switched_off_until_switched_back() -> None:
    ask, before = asking(), []

    def off() -> None:
        before.append(dynamo.switch())

    def on() -> None:
        dynamo.switch(before.pop())

    for function in (off, on, dynamo.switch):
        dynamo.leave_alone(function)

    def loop(x: Tensor) -> list[Tensor]:
        told = []
        for _ in range(1):
            torch._dynamo.graph_break()
            told.append(ask(x))
            off()
            told.append(ask(x))
            on()
            told.append(ask(x))
        return told

    told = torch.compile(loop, backend=Counting())(torch.zeros(()))
    assert [float(one) for one in told] == [COMPILED, EAGER, COMPILED]


def test_is_compiling_a_frame() -> None:
    seen = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.append(dynamo.is_compiling_a_frame())
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(()))
    assert seen == [True]
    assert not dynamo.is_compiling_a_frame()


# --- SavedTensorsHooks ----------------------------------------------------------------------------


class Seen:
    """Hooks, and how many tensors they were given."""

    def __init__(self) -> None:
        self.packed = 0
        self.hooks = SavedTensorsHooks(self.pack, lambda saved: saved)

    def pack(self, tensor: Tensor) -> Tensor:
        self.packed += 1
        return tensor


def graph(x: Tensor) -> Tensor:
    return x.exp()  # saves one tensor


def fails(x: Tensor) -> Tensor:
    graph(x)
    raise RuntimeError("refused")


@pytest.mark.parametrize("function", [graph, fails])
@pytest.mark.parametrize(
    ("entered", "packed", "afterwards"),
    [
        ("", (0, 0), (0, 0)),
        ("ours", (0, 0), (1, 0)),
        ("ours others", (0, 1), (0, 2)),  # others within them are left as they are
        ("others ours", (0, 1), (1, 1)),  # others around them are the graph's
    ],
)
def test_a_graph_runs_without_the_hooks(
    entered: str, packed: tuple[int, int], afterwards: tuple[int, int], function: Any
) -> None:
    ours, others, x = Seen(), Seen(), torch.ones(3, requires_grad=True)
    named = {"ours": ours.hooks, "others": others.hooks}
    with ExitStack() as inside:
        for name in entered.split():
            inside.enter_context(named[name])
        with suppress(RuntimeError):
            found = ours.hooks.run_without(function, (x,))
            assert torch.equal(found, x.detach().exp())
        assert (ours.packed, others.packed) == packed
        graph(x)
        assert (ours.packed, others.packed) == afterwards
    graph(x)
    assert (ours.packed, others.packed) == afterwards
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_after_a_forward_that_raised_they_are_gone() -> None:
    seen = Seen()
    with pytest.raises(RuntimeError, match="refused"), seen.hooks:
        fails(torch.ones(3, requires_grad=True))
    assert seen.packed == 1
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_an_older_torch_is_refused_where_it_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_task, "top_saved_tensors_hooks", None)
    seen, x = Seen(), torch.ones(3, requires_grad=True)
    with seen.hooks, pytest.raises(NotImplementedError, match=r"torch 2\.8"):
        seen.hooks.run_without(graph, (x,))
    assert torch.equal(seen.hooks.run_without(graph, (x,)), graph(x))


@pytest.mark.parametrize("on_first", [True, False])
def test_on_and_off_compiles_nothing_again(on_first: bool) -> None:
    seen, forward, backward = Seen(), Counting(boxed=True), Counting(boxed=True)
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    compiled = torch.compile(graph, backend=backend)
    packed = []
    for on in (on_first, not on_first, True, False):
        x = torch.ones(3, requires_grad=True)
        if on:
            with seen.hooks:
                compiled(x).sum().backward()
        else:
            compiled(x).sum().backward()
        assert torch.equal(x.grad, x.exp().detach())
        packed.append(seen.packed)
    assert packed[-1] == 2, "they were in use"
    assert (forward.graphs, backward.graphs) == (1, 1)
