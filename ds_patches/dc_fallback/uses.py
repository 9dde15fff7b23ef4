"""What code that runs eagerly gets to see of a partitioned parameter: a gathered tensor.

The parameter itself stays partitioned throughout. Autograd sees

    parameter -> root -> gathered tensor, one per module call -> the code's own operations

so that the root, which takes no memory, is handed the sum of the gradients of all uses, once a
backward; and the gathered tensor, which no parameter refers to, is freed as soon as nothing does.
What autograd would save of it for the backward is saved as a note of how to gather it again.

A gather is a collective, so how many there are must not hang on data that differs by rank. Within
one call of a module a parameter is gathered once, however often the code reads it (a loop over the
experts that were hit reads it as often as there are such experts); and all parameters below a
ZeRO-3 leaf module, a unit, are gathered at the first use of one.

The idea is that of parametrized data parallelism (SimpleFSDP, arXiv:2411.00284).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ds_patches.steps.saved_view import SavedView, storage_of

#: In place of a module: what a backward runs again.
_BACKWARD = object()

#: Gathers parameters; returns their full values, in order.
Gather = Callable[[Sequence[torch.nn.Parameter]], list[torch.Tensor]]
#: Takes the full gradient of a parameter.
Deliver = Callable[[torch.nn.Parameter, torch.Tensor], None]


class Call:
    """One call of a module, and what was gathered for it.

    full: the gathered values, by parameter; `version`: PyTorch's count of writes to them.
    uses: what the code got to see of them, which has a gradient or not, by parameter and by whether
        gradients were being recorded.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.dynamo: Any = None  # what to switch back on at its end
        self.full: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.version: dict[torch.nn.Parameter, int] = {}
        self.uses: dict[tuple[torch.nn.Parameter, bool], torch.Tensor] = {}


class Calls(list[Call]):
    """The calls of modules that are under way, innermost last."""

    def open(self, module: Any) -> Call:
        self.append(Call(module))
        return self[-1]

    def close(self, module: Any) -> list[Call]:
        """End the call of `module`, and those within it that raised; return all of them."""
        for index in reversed(range(len(self))):
            if self[index].module is module:
                return self.cut(index)
        return []

    def cut(self, depth: int) -> list[Call]:
        """End all but the outermost `depth` calls; return those that end."""
        ended = self[depth:]
        del self[depth:]
        return ended


class _Roots(torch.autograd.Function):
    """A root for each trained parameter of a unit: of its shape, without memory.

    anchor: has autograd record it. The parameters are no inputs, whose hooks would be given none.
    """

    @staticmethod
    def forward(ctx: Any, deliver: Deliver, shapes: Any, params: Any, anchor: torch.Tensor) -> Any:
        ctx.deliver, ctx.params = deliver, params
        return tuple(
            param.new_empty(()).expand(shape) for param, shape in zip(params, shapes, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # Of a leaf module all get a gradient, zeros where there was no use: the ranks must agree.
        for param, grad in zip(ctx.params, grads, strict=True):
            ctx.deliver(param, grad)
        return None, None, None, None


class _Use(torch.autograd.Function):
    """A gathered tensor, as a function of its root."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, done: Callable[[], None], root: Any) -> Any:
        ctx.done = done
        return full.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.done()  # every node that needs the values has run
        return None, None, grad


class Uses:
    """Gathers what eager code reads, once per module call and unit.

    shape_of: the full shape of a parameter. `is_here`: whether somebody else has gathered it, who
        then also decides how long it stays.
    units: parameters that go together, in an order that is the same on every rank.
    """

    def __init__(
        self,
        gather: Gather,
        deliver: Deliver,
        shape_of: Callable[[torch.nn.Parameter], Sequence[int]],
        is_here: Callable[[torch.nn.Parameter], bool],
        units: Iterable[Sequence[torch.nn.Parameter]],
    ) -> None:
        self.calls = Calls()
        self.gathered_any = False
        self._gather, self._deliver = gather, deliver
        self._shape_of, self._is_here = shape_of, is_here
        self._units = {param: unit for unit in units for param in unit}
        self._roots: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._origins: dict[int, tuple[Call, torch.nn.Parameter]] = {}
        # What a backward has gathered: that of one module call at a time, as in the forward.
        self._again: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._again_for: Call | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    def cached(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """What this module call has seen of `param` before."""
        return self.calls[-1].uses.get((param, torch.is_grad_enabled()))

    def use(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The full value of `param`; with a gradient, if gradients are being recorded."""
        call = self.calls[-1]
        if param not in call.full:
            self._fill(call, param)
        records = torch.is_grad_enabled() and param.requires_grad
        full = call.full[param]
        seen: torch.Tensor = full
        if records:
            done = partial(self._used_again, call, param)
            seen = _Use.apply(full, done, self._root(param))  # type: ignore[no-untyped-call]
        call.uses[param, torch.is_grad_enabled()] = seen
        return seen

    def param_of(self, tensor: torch.Tensor) -> torch.nn.Parameter | None:
        """The parameter that `tensor` was gathered from, for a call that is under way."""
        origin = self._origins.get(storage_of(tensor))
        return None if origin is None else origin[1]

    def _unit_of(self, param: torch.nn.Parameter) -> Sequence[torch.nn.Parameter]:
        return self._units.get(param, (param,))

    def _fill(self, call: Call, param: torch.nn.Parameter) -> None:
        # No tensors of inference_mode: they could not be used outside it, nor count writes.
        with torch.inference_mode(False), torch.no_grad():
            if self._is_here(param):
                call.full[param] = param.detach()
                return
            absent = [p for p in self._unit_of(param) if not self._is_here(p)]
            for p, full in zip(absent, self._gather(absent), strict=True):
                call.full[p], call.version[p] = full, full._version
                self._origins[storage_of(full)] = call, p
        self.gathered_any = True

    def _root(self, param: torch.nn.Parameter) -> torch.Tensor:
        if param not in self._roots:
            params = [p for p in self._unit_of(param) if p.requires_grad]
            shapes = [tuple(self._shape_of(p)) for p in params]
            recorded: Any = _Roots.apply
            roots = recorded(self._deliver, shapes, params, self._anchor)
            self._roots.update(zip(params, roots, strict=True))
        return self._roots[param]

    def close(self, ended: Sequence[Call]) -> Sequence[Call]:
        """Let go of what was gathered for calls that have ended; return them."""
        for call in ended:
            for full in call.full.values():
                self._origins.pop(storage_of(full), None)
            call.full, call.uses = {}, {}
        if not self.calls:
            self._roots = {}
        return ended

    def pack(self, tensor: torch.Tensor) -> Any:
        """In place of what autograd saves: a note, if it is a gathered tensor or a view of one."""
        if not self._origins:
            return tensor
        origin, view = self._origins.get(storage_of(tensor)), SavedView.of(tensor)
        if origin is None or view is None or view.dtype != origin[1].dtype:
            return tensor  # a complex view has other strides
        call, param = origin
        if call.full[param]._version != call.version[param]:
            return tensor  # the code has written to it, and a gather would not know
        return call, param, view

    def unpack(self, saved: Any) -> torch.Tensor:
        """What `pack` was given, gathered again."""
        if isinstance(saved, torch.Tensor):
            return saved
        call, param, view = saved
        if call is not self._again_for:
            self._again_for, self._again = call, {}
        if param not in self._again:
            params = self._unit_of(param)
            with torch.no_grad():
                self._again.update(zip(params, self._gather(params), strict=True))
        return self._again[param].as_strided(view.size, view.stride, view.offset)

    def _used_again(self, call: Call, param: torch.nn.Parameter) -> None:
        if call is self._again_for:
            self._again.pop(param, None)

    def recompute(self) -> None:
        """A backward runs code of the forward again, and outside any module call."""
        self.calls.open(_BACKWARD)

    def forget_backward(self) -> None:
        """After a backward, whole or not: nothing gathered for it stays."""
        self._again_for, self._again = None, {}
        self.close(self.calls.close(_BACKWARD))
