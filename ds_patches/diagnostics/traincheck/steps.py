"""The trainable parameters of a model, and which of them an optimizer steps with a gradient.

Gradients are read in a pre-hook of the PyTorch optimizer that DeepSpeed steps with: reduced,
unscaled and clipped, in every stage and release. The hook does not run in a step that is skipped
for overflow. Comparing parameters before and after a step would need a copy of them, and weight
decay changes them without a gradient.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.core.layer import Layer
from ds_patches.diagnostics.traincheck.report import Untrained
from ds_patches.upstream import fragments
from ds_patches.upstream.classes import ZERO3, class_of
from ds_patches.upstream.coverage import compiles_backward

#: The recorded attributes: of this rank, and at the end of the block of any rank.
FLAGS = ("in_optimizer", "stepped", "has_gradient", "keeps_grad", "ran")


@dataclass
class Trainable:
    """A parameter with `requires_grad`, and what was recorded of it.

    chains: its module and all modules around this; several if the parameter is tied.
    in_optimizer: the optimizer steps at least a part of it. stepped: with a gradient that is not
    zero. has_gradient: a backward computed a gradient that the optimizer reads; True if hooks do
    not see all backwards. keeps_grad: `grad` was set when a step began. ran: a module whose forward
    uses it ran in eager code.
    """

    name: str
    param: Any  # nn.Parameter, whose register_hook has no types
    chains: Sequence[Sequence[nn.Module]]
    in_optimizer: bool = False
    stepped: bool = False
    has_gradient: bool = False
    keeps_grad: bool = False
    ran: bool = False

    def record_gradient(self, _: torch.Tensor) -> None:
        """Record a gradient; a tensor hook of the parameter."""
        self.has_gradient = True

    def record_runs(self, ran: Collection[nn.Module]) -> None:
        """Set `ran`: a container without a forward, as ParameterList, is used by one around it."""
        users = (next(filter(_has_forward, chain), chain[-1]) for chain in self.chains)
        self.ran = any(user in ran for user in users)

    @property
    def is_compiled(self) -> bool:
        """True if a module in `chains` is compiled, so that no hook runs inside it."""
        # Set by `module.compile()` and `engine.compile()`; by `torch.compile(module)`.
        return any(
            getattr(module, "_compiled_call_impl", None) or hasattr(module, "_orig_mod")
            for chain in self.chains
            for module in chain
        )

    @property
    def trained(self) -> bool:
        """True if it was stepped with a gradient, and not with an earlier step's, left in place."""
        return self.stepped and self.has_gradient

    @property
    def should_train(self) -> bool:
        """True if the parameter should have trained."""
        return self.in_optimizer and (self.ran or self.keeps_grad or self.is_compiled)

    def untrained(self) -> Untrained:
        """Return the entry for the report, with a likely reason."""
        notes = []
        if not self.in_optimizer:
            notes.append("not in the optimizer")
        elif self.keeps_grad:
            notes.append("its gradient stayed on the parameter and was not reduced")
        elif not self.ran and self.is_compiled:
            notes.append("in a compiled module, where it is not seen to run")
        if self.stepped:
            notes.append("stepped with the gradient of an earlier step")
        return Untrained(self.name, type(self.chains[0][0]).__name__, ", ".join(notes))


def trainables(model: nn.Module) -> list[Trainable]:
    """Return the trainable parameters of a model, in its order, which is the same on every rank."""
    modules = dict(model.named_modules())
    chains: dict[int, list[list[nn.Module]]] = {}
    for name, module in modules.items():
        path = name.split(".")
        chain = [modules[".".join(path[:size])] for size in range(len(path), -1, -1)]
        for param in module.parameters(recurse=False):
            chains.setdefault(id(param), []).append(chain)
    params = (pair for pair in model.named_parameters() if pair[1].requires_grad)
    return [Trainable(name, param, chains[id(param)]) for name, param in params]


def _has_forward(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


class Steps:
    """The steps of an engine inside the block of `recorded`: how many, and of which parameters."""

    def __init__(self, engine: Any, params: Sequence[Trainable]) -> None:
        self._module, self._optimizer = engine.module, engine.optimizer
        # Hooks do not run in compiled backwards, and did not in those before the block.
        self._is_partial = (
            compiles_backward(engine)
            or engine.micro_steps % engine.gradient_accumulation_steps() != 0
        )
        self._slices = fragments.slices(self._optimizer)
        self._params = {id(param.param): param for param in params}
        self._stepped = False
        self.taken = self.skipped = 0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        params = self._params.values()
        ran: set[nn.Module] = set()

        def record(module: nn.Module, _: Any) -> None:
            # Without this condition, Dynamo would trace the side effect, or break the graph.
            if not torch.compiler.is_compiling():
                ran.add(module)

        with ExitStack() as block:
            for module in self._module.modules():
                block.callback(module.register_forward_pre_hook(record).remove)
            for inner in fragments.torch_optimizers(self._optimizer):
                block.callback(inner.register_step_pre_hook(self._read).remove)
            block.callback(Layer(self._optimizer, "step", self._step).remove)
            for param in params:
                block.callback(param.param.register_hook(param.record_gradient).remove)
            yield
        is_partial = self._is_partial or not any(param.has_gradient for param in params)
        is_new = is_partial or not fragments.keeps_gradients(self._optimizer)
        is_read = class_of(self._optimizer) != ZERO3  # else a step never reads `param.grad`
        for key, param in self._params.items():
            param.record_runs(ran)
            param.in_optimizer = key in self._slices
            has_gradient = param.has_gradient or is_new
            param.has_gradient = has_gradient and (is_read or not param.keeps_grad)

    def _step(self, step: Wrapped, _: Any, args: Args, kwargs: Kwargs) -> Any:
        """Wrap `step` of this optimizer: record `keeps_grad`, and if the step was skipped."""
        self._stepped = False
        grads = ((key, param.param.grad) for key, param in self._params.items())
        for key in _nonzero((key, grad) for key, grad in grads if grad is not None):
            self._params[key].keeps_grad = True
        result = step(*args, **kwargs)
        self.taken += self._stepped
        self.skipped += not self._stepped
        return result

    @torch.no_grad()
    def _read(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped = True
        grads = {id(p): p.grad for group in inner.param_groups for p in group["params"]}
        parts = []
        for key in self._slices.keys() & self._params.keys():
            part = self._slices[key]
            if (grad := grads.get(id(part.stepped))) is not None:
                flat = (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
                parts.append((key, flat.narrow(0, part.start, part.length)))
        for key in _nonzero(parts):
            self._params[key].stepped = True


@torch.no_grad()
def _nonzero(grads: Iterable[tuple[int, Any]]) -> set[int]:
    """Return the keys of tensors with an element that is not zero; synchronizes once."""
    nonzero = {key: grad.any() for key, grad in grads}
    values = torch.stack([*nonzero.values()]).tolist() if nonzero else []
    return {key for key, value in zip(nonzero, values, strict=True) if value}
