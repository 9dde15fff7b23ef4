"""Functions of parameters, computed in a ``GatheredParameters``: their backward finds them whole.

A graph keeps a parameter itself, of which nothing is there after the block. So before a backward
begins, what nodes have saved of such parameters is replaced by what gathers them, if need be, when
the node runs: in every backward anew, and no longer than the node. PyTorch wants the gradient to
have the parameter's shape, which it gets for that moment. Nodes behind the output of a module are
not looked at: the module's parameters are gathered for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from ds_patches.core.errors import Refused
from ds_patches.steps.ranks import on_any
from ds_patches.upstream import zero3

from .boundaries import is_boundary

_CHANGED = (
    "backward over a function of parameters that have changed since: it was computed before "
    "engine.step(), or before they were written to. Compute it again."
)

_HOOKED = "ds_patches.zero3_retain"


class Used:
    """Parameters that a script has gathered with a graph since the last step.

    version: of all of them; it moves with each step.
    """

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version
        self._at = version()
        self._params: dict[int, tuple[Any, int]] = {}
        self._told: dict[int, Any] = {}  # parameters that one rank may have written to for all

    def note(self, params: list[Any], by_one: bool) -> None:
        """Note them at the end of a block, unless an earlier one in this step had them.

        by_one: whether the block hands on what one rank has written to them.
        """
        self._forget()
        for param in params:
            self._params.setdefault(id(param), (param, param._version))
        if by_one:
            self._told.update({id(param): param for param in params})

    def _forget(self) -> None:
        if self._at != self._version():
            self._params.clear()
            self._told.clear()
            self._at = self._version()

    def __bool__(self) -> bool:
        """Whether there are any; those of an older step are forgotten."""
        self._forget()
        return bool(self._params)

    def backward(self, run: Callable[..., Any], loss: Tensor, *rest: Any) -> Any:
        """Run a backward over `loss`, which finds them whole."""
        with ExitStack() as stack:
            self._prepare(loss.grad_fn, stack)
            return run(loss, *rest)

    def _prepare(self, root: Any, stack: ExitStack) -> None:
        now = {key: one for key, one in self._params.items() if one[0]._version == one[1]}
        saved = {_place(param): key for key, (param, _) in now.items()}
        at, seen = self._at, set()

        def pack(tensor: Tensor) -> Any:
            return saved.get(_place(tensor), tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else self._value(*now[packed], at)

        told, written = None, False
        for node in _nodes(root):
            ends = {id(getattr(one, "variable", None)): one for one in _before(node)}
            noted = ends.keys() & self._params.keys()
            written |= not noted <= now.keys()
            told = next((self._told[key] for key in noted & self._told.keys()), told)
            for key in noted & now.keys():
                if key not in seen:
                    seen.add(key)
                    _shape(now[key][0], ends[key], stack)
            if noted & now.keys():
                written |= not _hook(node, pack, unpack)
        # Only who writes sees it, and the others would wait for its gathers.
        if told is not None and on_any([written], zero3.group_of(told)).item():
            raise Refused(_CHANGED)

    def _value(self, param: Any, writes: int, at: int) -> Tensor:
        if (self._version(), param._version) != (at, writes):
            raise Refused(_CHANGED)
        if zero3.is_here(param):
            found: Tensor = param.detach()
            return found
        return zero3.full_values([param])[0]


def _shape(param: Any, accumulates: Any, stack: ExitStack) -> None:
    """Let a parameter that is not here have its shape where its gradient comes to it."""
    before: list[Tensor] = []

    def begins(_: Any) -> None:
        if param.shape != zero3.shape_of(param):
            before.append(param.data)
            zero3.give_shape(param)

    def ends(*_: Any) -> None:
        if before:
            param.data = before.pop()

    stack.callback(accumulates.register_prehook(begins).remove)
    stack.callback(accumulates.register_hook(ends).remove)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return where its elements lie, which an alias shares, and no other parameter."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape


def _before(node: Any) -> Iterator[Any]:
    return (one for one, _ in node.next_functions if one is not None)


def _nodes(root: Any) -> Iterator[Any]:
    """Yield those that lead there, up to the outputs of modules."""
    seen, pending = set(), [root] if root is not None else []
    while pending:
        node = pending.pop()
        if node not in seen and not is_boundary(node):
            seen.add(node)
            yield node
            pending.extend(_before(node))


def _hook(node: Any, pack: Callable[..., Any], unpack: Callable[..., Any]) -> bool:
    """Have what a node saved packed and unpacked so, once; or return False if it was written to.

    PyTorch sees writes to what has no such functions. What was released has them for nothing.
    """
    if _HOOKED in node.metadata:
        return True
    names = [name for name in dir(node) if name.startswith("_raw_saved_")]
    try:
        for name in names:
            getattr(node, name.replace("raw_", "", 1), None)
        node.metadata[_HOOKED] = True
        for name in names:
            found = getattr(node, name)
            for raw in found if isinstance(found, tuple) else (found,):
                raw.register_hooks(pack, unpack)
    except RuntimeError as error:
        return "modified by an inplace operation" not in str(error)
    return True
