"""Backwards over functions of parameters that were computed in a ``GatheredParameters``.

A graph refers to the parameter itself, which is empty after the block. So before a backward begins,
saved tensors that are such parameters get hooks, which gather the parameter when its node runs: in
every backward anew, and no longer than the node. PyTorch requires the gradient to have the
parameter's shape, so the parameter is expanded while its gradient is accumulated. Nodes behind the
output of a module are skipped, since the module's parameters are gathered for them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

from torch import Tensor

from ds_patches.core.errors import Refused
from ds_patches.steps.graph_task import SavedView, graph_nodes
from ds_patches.upstream import zero3

from .edges import is_edge

_CHANGED = (
    "backward over a function of parameters that have changed since: engine.step() or the script "
    "has written to them after it was computed. Compute it again."
)


class BlockParams:
    """The parameters that scripts have gathered with a graph since the last step.

    version: returns a number that changes with each step.
    """

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version
        self._params_version = version()
        self._params: dict[int, tuple[Any, int]] = {}  # by id, with its count of writes

    def add(self, params: list[Any]) -> None:
        """Add a block's parameters, except those that an earlier block of this step had."""
        self._drop_old()
        for param in params:
            self._params.setdefault(id(param), (param, param._version))

    def _drop_old(self) -> None:
        if self._params_version != self._version():
            self._params.clear()
            self._params_version = self._version()

    def __bool__(self) -> bool:
        """Return True if there are any; those of an older step are dropped."""
        self._drop_old()
        return bool(self._params)

    def backward(self, run: Callable[..., Any], loss: Tensor, *args: Any) -> Any:
        """Run a backward over `loss`, with the parameters gathered where nodes need them."""
        with ExitStack() as stack:
            self._hook_nodes(loss.grad_fn, stack)
            return run(loss, *args)

    def _hook_nodes(self, root: Any, stack: ExitStack) -> None:
        """Hook the saved tensors and gradient accumulators of unchanged parameters."""
        params = {
            key: (p, writes) for key, (p, writes) in self._params.items() if p._version == writes
        }
        saved = {SavedView.of(param): param_id for param_id, (param, _) in params.items()}
        version, seen = self._params_version, set[int]()

        def pack(tensor: Tensor) -> Any:
            return saved.get(SavedView.of(tensor), tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else self._gather(*params[packed], version)

        for node in graph_nodes([root], stops=is_edge):
            accumulators = {id(getattr(n, "variable", None)): n for n, _ in node.next_functions}
            used = accumulators.keys() & params.keys()
            for param_id in used - seen:
                _expand_for_gradient(params[param_id][0], accumulators[param_id], stack)
            seen |= used
            for saved_tensor in _saved_tensors(node) if used else ():
                with suppress(RuntimeError):  # it has hooks already, or was released
                    saved_tensor.register_hooks(pack, unpack)

    def _gather(self, param: Any, writes: int, version: int) -> Tensor:
        if (self._version(), param._version) != (version, writes):
            raise Refused(_CHANGED)
        if zero3.is_available(param):
            full: Tensor = param.detach()
            return full
        return zero3.full_value(param)


def _expand_for_gradient(param: Any, accumulator: Any, stack: ExitStack) -> None:
    """Give a partitioned parameter its full shape while its gradient is accumulated."""
    partitioned: list[Tensor] = []

    def expand(_: Any) -> None:
        if param.shape != param.ds_shape:
            partitioned.append(param.data)
            param.data = param.data.new_zeros(()).expand(param.ds_shape)

    def restore(*_: Any) -> None:
        if partitioned:
            param.data = partitioned.pop()

    stack.callback(accumulator.register_prehook(expand).remove)
    stack.callback(accumulator.register_hook(restore).remove)


def _saved_tensors(node: Any) -> Iterator[Any]:
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            with suppress(RuntimeError):  # released
                saved = getattr(node, name)
                yield from saved if isinstance(saved, tuple) else (saved,)
