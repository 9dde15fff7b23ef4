"""Functions of parameters, computed in a ``GatheredParameters``: their backward finds them whole.

A graph keeps a parameter itself, of which nothing is there after the block. So before a backward
begins, what nodes have saved of such parameters is replaced by what gathers them, if need be, when
the node runs: in every backward anew, and no longer than the node. PyTorch wants the gradient to
have the parameter's shape, which it gets for that moment. Nodes behind the output of a module are
not looked at: the module's parameters are gathered for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

from torch import Tensor

from ds_patches.core.errors import Refused
from ds_patches.steps.saved_view import SavedView
from ds_patches.upstream import zero3

from .edges import is_edge

_CHANGED = (
    "backward over a function of parameters that have changed since: it was computed before "
    "engine.step(), or before they were written to. Compute it again."
)


class Used:
    """Parameters that a script has gathered with a graph since the last step.

    version: of all of them; it moves with each step.
    """

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version
        self._at = version()
        self._params: dict[int, tuple[Any, int]] = {}

    def note(self, params: list[Any]) -> None:
        """Note them at the end of a block, unless an earlier one in this step had them."""
        self._forget()
        for param in params:
            self._params.setdefault(id(param), (param, param._version))

    def _forget(self) -> None:
        if self._at != self._version():
            self._params.clear()
            self._at = self._version()

    def __bool__(self) -> bool:
        """Return True if there are any; those of an older step are forgotten."""
        self._forget()
        return bool(self._params)

    def backward(self, run: Callable[..., Any], loss: Tensor, *rest: Any) -> Any:
        """Run a backward over `loss`, which finds them whole."""
        with ExitStack() as stack:
            self._prepare(loss.grad_fn, stack)
            return run(loss, *rest)

    def _prepare(self, root: Any, stack: ExitStack) -> None:
        now = {
            key: (p, writes) for key, (p, writes) in self._params.items() if p._version == writes
        }
        saved = {SavedView.of(param): key for key, (param, _) in now.items()}
        at, seen = self._at, set()

        def pack(tensor: Tensor) -> Any:
            return saved.get(SavedView.of(tensor), tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else self._value(*now[packed], at)

        for node in _nodes(root):
            ends = {id(getattr(n, "variable", None)): n for n in _before(node)}
            for key in ends.keys() & now.keys():
                if key not in seen:
                    seen.add(key)
                    _shape(now[key][0], ends[key], stack)
            for raw in _saved(node) if ends.keys() & now.keys() else ():
                with suppress(RuntimeError):  # it has such functions already, or was released
                    raw.register_hooks(pack, unpack)

    def _value(self, param: Any, writes: int, at: int) -> Tensor:
        if (self._version(), param._version) != (at, writes):
            raise Refused(_CHANGED)
        if zero3.is_available(param):
            found: Tensor = param.detach()
            return found
        return zero3.full_value(param)


def _shape(param: Any, accumulates: Any, stack: ExitStack) -> None:
    """Let a parameter that is not here have its shape where its gradient comes to it."""
    before: list[Tensor] = []

    def begins(_: Any) -> None:
        if param.shape != param.ds_shape:
            before.append(param.data)
            param.data = param.data.new_zeros(()).expand(param.ds_shape)

    def ends(*_: Any) -> None:
        if before:
            param.data = before.pop()

    stack.callback(accumulates.register_prehook(begins).remove)
    stack.callback(accumulates.register_hook(ends).remove)


def _before(node: Any) -> Iterator[Any]:
    return (before for before, _ in node.next_functions if before is not None)


def _nodes(root: Any) -> Iterator[Any]:
    """Yield those that lead there, up to the outputs of modules."""
    seen, pending = set(), [root] if root is not None else []
    while pending:
        node = pending.pop()
        if node not in seen and not is_edge(node):
            seen.add(node)
            yield node
            pending.extend(_before(node))


def _saved(node: Any) -> Iterator[Any]:
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            with suppress(RuntimeError):  # released
                saved = getattr(node, name)
                yield from saved if isinstance(saved, tuple) else (saved,)
