"""The gathered tensor that eager code gets for a partitioned parameter.

The parameter itself stays partitioned throughout. Autograd sees

    parameter -> root -> gathered tensor, one per module call -> the code's own operations

The root takes no memory, and receives the sum of the gradients of all uses, once a backward. The
gathered tensor, to which no parameter refers, is freed with its last reference. Where autograd
would save it for the backward, it saves a note of how to gather it again.

A gather is a collective, so the number of gathers must not depend on data that differs by rank.
Within one call of a module a parameter is gathered once, however often the code reads it (a loop
over the experts that were used reads it once for each); and all parameters below a ZeRO-3 leaf
module, a unit, are gathered at the first use of one.

The idea is that of parametrized data parallelism (SimpleFSDP, arXiv:2411.00284).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ds_patches.steps.graph_task import SavedView, storage_of

#: Stands for the module of code that a backward recomputes.
_BACKWARD = object()

#: All-gathers parameters; returns their full values, in order.
Gather = Callable[[Sequence[torch.nn.Parameter]], list[torch.Tensor]]
#: Receives the full gradient of a parameter.
Deliver = Callable[[torch.nn.Parameter, torch.Tensor], None]


class Call:
    """One call of a module, and the tensors that were gathered for it.

    full: the gathered tensors, by parameter; `version`: PyTorch's count of writes to them.
    uses: the tensors that the code got, by parameter and by whether gradients were being recorded.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.dynamo_callback: Any = None  # to set again at its end
        self.full: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.version: dict[torch.nn.Parameter, int] = {}
        self.uses: dict[tuple[torch.nn.Parameter, bool], torch.Tensor] = {}


class Calls(list[Call]):
    """The calls of modules that are running, innermost last."""

    def open(self, module: Any) -> Call:
        """Begin a call of `module`."""
        self.append(Call(module))
        return self[-1]

    def close(self, module: Any) -> list[Call]:
        """End the call of `module`, and those within it that raised; return all of them."""
        for index in reversed(range(len(self))):
            if self[index].module is module:
                return self.truncate(index)
        return []

    def truncate(self, depth: int) -> list[Call]:
        """End all but the outermost `depth` calls; return those that end."""
        ended = self[depth:]
        del self[depth:]
        return ended


class _Roots(torch.autograd.Function):
    """A root for each trainable parameter of a unit: of its shape, without memory.

    anchor: makes autograd record it. The parameters are no inputs, as their hooks would get None.
    """

    @staticmethod
    def forward(ctx: Any, deliver: Deliver, shapes: Any, params: Any, anchor: torch.Tensor) -> Any:
        ctx.deliver, ctx.params = deliver, params
        return tuple(
            param.new_empty(()).expand(shape) for param, shape in zip(params, shapes, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # All parameters of a leaf module get a gradient, or zeros, since ranks may use others.
        for param, grad in zip(ctx.params, grads, strict=True):
            ctx.deliver(param, grad)
        return None, None, None, None


class _Use(torch.autograd.Function):
    """The gathered tensor, as a function of its root."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, on_backward: Callable[[], None], root: Any) -> Any:
        ctx.on_backward = on_backward
        return full.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.on_backward()  # every node that needs the values has run
        return None, None, grad


class Uses:
    """Gathers the parameters that eager code reads, once per module call and unit.

    shape_of: returns the full shape of a parameter.
    is_available: returns True if DeepSpeed or the script has gathered a parameter, and releases it.
    units: parameters that are gathered together, in an order that is the same on every rank.
    """

    def __init__(
        self,
        gather: Gather,
        deliver: Deliver,
        shape_of: Callable[[torch.nn.Parameter], Sequence[int]],
        is_available: Callable[[torch.nn.Parameter], bool],
        units: Iterable[Sequence[torch.nn.Parameter]],
    ) -> None:
        self.calls = Calls()
        self.gathered_any = False
        self._gather, self._deliver = gather, deliver
        self._shape_of, self._is_available = shape_of, is_available
        self._units = {param: unit for unit in units for param in unit}
        self._roots: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._origins: dict[int, tuple[Call, torch.nn.Parameter]] = {}
        # Tensors gathered in a backward, for one module call at a time, as in the forward.
        self._regathered: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._regathered_call: Call | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    def cached(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the tensor that this module call has got for `param` before, or None."""
        return self.calls[-1].uses.get((param, torch.is_grad_enabled()))

    def use(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Return the full value of `param`, with a gradient if one is recorded. Collective."""
        call = self.calls[-1]
        if param not in call.full:
            self._gather_unit(call, param)
        records_graph = torch.is_grad_enabled() and param.requires_grad
        full = call.full[param]
        use: torch.Tensor = full
        if records_graph:
            on_backward = partial(self._free_regathered, call, param)
            use = _Use.apply(full, on_backward, self._root(param))  # type: ignore[no-untyped-call]
        call.uses[param, torch.is_grad_enabled()] = use
        return use

    def param_of(self, tensor: torch.Tensor) -> torch.nn.Parameter | None:
        """Return the parameter that `tensor` was gathered from in a running call, or None."""
        origin = self._origins.get(storage_of(tensor))
        return None if origin is None else origin[1]

    def _unit_of(self, param: torch.nn.Parameter) -> Sequence[torch.nn.Parameter]:
        return self._units.get(param, (param,))

    def _gather_unit(self, call: Call, param: torch.nn.Parameter) -> None:
        # Inference tensors could not be used outside inference_mode, nor count writes.
        with torch.inference_mode(False), torch.no_grad():
            if self._is_available(param):
                call.full[param] = param.detach()
                return
            partitioned = [p for p in self._unit_of(param) if not self._is_available(p)]
            for p, full in zip(partitioned, self._gather(partitioned), strict=True):
                call.full[p], call.version[p] = full, full._version
                self._origins[storage_of(full)] = call, p
        self.gathered_any = True

    def _root(self, param: torch.nn.Parameter) -> torch.Tensor:
        if param not in self._roots:
            params = [p for p in self._unit_of(param) if p.requires_grad]
            shapes = [tuple(self._shape_of(p)) for p in params]
            make_roots: Any = _Roots.apply
            roots = make_roots(self._deliver, shapes, params, self._anchor)
            self._roots.update(zip(params, roots, strict=True))
        return self._roots[param]

    def close(self, ended: Sequence[Call]) -> Sequence[Call]:
        """Free the tensors that were gathered for calls that have ended; return the calls."""
        for call in ended:
            for full in call.full.values():
                self._origins.pop(storage_of(full), None)
            call.full, call.uses = {}, {}
        if not self.calls:
            self._roots = {}
        return ended

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return a note to save in place of a gathered tensor or a view of one."""
        if not self._origins:
            return tensor
        origin, view = self._origins.get(storage_of(tensor)), SavedView.of(tensor)
        if origin is None or view is None or view.dtype != origin[1].dtype:
            return tensor  # a view of another dtype has other strides
        call, param = origin
        if call.full[param]._version != call.version[param]:
            return tensor  # gathering it again would lose the code's writes
        return call, param, view

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor that was passed to `pack`, gathered again. Collective."""
        if isinstance(saved, torch.Tensor):
            return saved
        call, param, view = saved
        if call is not self._regathered_call:
            self._regathered_call, self._regathered = call, {}
        if param not in self._regathered:
            params = self._unit_of(param)
            with torch.no_grad():
                self._regathered.update(zip(params, self._gather(params), strict=True))
        return self._regathered[param].as_strided(view.size, view.stride, view.offset)

    def _free_regathered(self, call: Call, param: torch.nn.Parameter) -> None:
        if call is self._regathered_call:
            self._regathered.pop(param, None)

    def recompute(self) -> None:
        """Begin a call for code of the forward that a backward runs outside any module call."""
        self.calls.open(_BACKWARD)

    def forget_backward(self) -> None:
        """Free all tensors gathered for a backward, whether it ended or raised."""
        self._regathered_call, self._regathered = None, {}
        self.close(self.calls.close(_BACKWARD))
