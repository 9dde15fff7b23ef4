"""The trainable parameters of a model, and what a train check records of each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

    owner: the class of its module. users: the modules whose forward uses it; several if it is tied.
    compiled: a user, or a module around one, is compiled, so no hook of it runs.
    in_optimizer: the optimizer steps at least a part of it. trained: it was stepped with a gradient
    that is not zero. is_stale: with the gradient of the step before, by its fingerprint.
    has_gradient: a backward computed a gradient that the optimizer reads; True if hooks do not see
    all backwards. keeps_grad: `grad` was set when a step began. ran: a user ran in eager code.
    """

    name: str
    param: Any  # nn.Parameter, whose register_hook has no types
    owner: str
    users: tuple[nn.Module, ...]
    compiled: bool
    in_optimizer: bool = False
    trained: bool = False
    is_stale: bool = False
    has_gradient: bool = False
    keeps_grad: bool = False
    ran: bool = False

    def record_gradient(self, _: torch.Tensor) -> None:
        """Record a gradient; a tensor hook of the parameter."""
        self.has_gradient = True

    @property
    def should_train(self) -> bool:
        """True if the parameter should have trained."""
        return self.in_optimizer and (self.ran or self.keeps_grad or self.compiled)

    def untrained(self) -> Untrained:
        """Return the entry for the report, with a likely reason."""
        notes = []
        if not self.in_optimizer:
            notes.append("not in the optimizer")
        elif self.keeps_grad:
            notes.append("its gradient stayed on the parameter and was not reduced")
        elif not self.ran and self.compiled:
            notes.append("in a compiled module, where it is not seen to run")
        if self.is_stale:
            notes.append("stepped with the gradient of an earlier step")
        return Untrained(self.name, self.owner, ", ".join(notes))


def trainables(model: nn.Module) -> list[Trainable]:
    """Return the trainable parameters of a model, in its order, which is the same on every rank."""
    modules = dict(model.named_modules())
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), []).append(name)
    params = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            owner = type(modules[owners[id(param)][0]]).__name__
            chains = [_with_parents(modules, path) for path in owners[id(param)]]
            users = tuple(chain[0] for chain in chains)
            # Set by `module.compile()` and `engine.compile()`; by `torch.compile(module)`.
            compiled = any(
                getattr(module, "_compiled_call_impl", None) or hasattr(module, "_orig_mod")
                for chain in chains
                for module in chain
            )
            params.append(Trainable(name, param, owner, users, compiled))
    return params


@contextmanager
def recorded(model: nn.Module, params: Sequence[Trainable]) -> Iterator[None]:
    """Set `ran` of each parameter at the end of the block, if a module that uses it ran."""
    ran: set[nn.Module] = set()

    def record(module: nn.Module, _: Any) -> None:
        # Without this condition, Dynamo would trace the side effect, or break the graph.
        if not torch.compiler.is_compiling():
            ran.add(module)

    users = {user for param in params for user in param.users}
    # In the model's order, not the set's, so that runs are alike.
    hooks = [m.register_forward_pre_hook(record) for m in model.modules() if m in users]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for param in params:
        param.ran = not ran.isdisjoint(param.users)


def _with_parents(modules: dict[str, nn.Module], name: str) -> list[nn.Module]:
    """Return the module that uses the parameters of a module, and all modules around it.

    The user of a container without a forward, such as ParameterList, is the first module around it
    that has one.
    """
    chain = [modules[name]]
    while name:
        name = name.rpartition(".")[0]
        chain.append(modules[name])
    has_forward = ["forward" in vars(m) or type(m).forward is not nn.Module.forward for m in chain]
    return chain[has_forward.index(True) if True in has_forward else -1 :]
