"""The trainable parameters of a model, and what a train check records of each."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_patches.diagnostics.traincheck.report import Untrained

#: The recorded attributes: of this rank, and at the end of the block of any rank.
FLAGS = ("in_optimizer", "trained", "is_stale", "has_gradient", "keeps_grad", "ran")


@dataclass
class Trainable:
    """A parameter with `requires_grad`, and what was recorded of it.

    chains: its module and all modules around this; several if the parameter is tied.
    in_optimizer: the optimizer steps at least a part of it. trained: it was stepped with a gradient
    that is not zero. is_stale: with the gradient of the step before, by its fingerprint.
    has_gradient: a backward computed a gradient that the optimizer reads; True if hooks do not see
    all backwards. keeps_grad: `grad` was set when a step began. ran: a module whose forward uses it
    ran in eager code.
    """

    name: str
    param: Any  # nn.Parameter, whose register_hook has no types
    chains: Sequence[Sequence[nn.Module]]
    in_optimizer: bool = False
    trained: bool = False
    is_stale: bool = False
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
        if self.is_stale:
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
