"""Which trainable parameters a model has, and what a check has seen of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_patches.diagnostics.traincheck.report import Untrained

#: What is seen of a parameter: first on this rank, in the end on any.
SEEN = ("held", "trained", "stale", "came", "left", "ran")


@dataclass
class Trainable:
    """A parameter with `requires_grad`, and what was seen of it and its gradient.

    owner: the class of the module that has it. users: the modules whose forward would use it, more
    than one where it is tied. compiled: some user is, or is below one that is: no hook of it runs.
    held: the optimizer steps at least a part of it. trained: stepped with a gradient. stale: with
    one of the same sums as the one before. left: a gradient lay on it when the step began, which is
    fine where the step takes it from there. came: a backward had one that was taken, or nobody
    knows, as in a deaf check. ran: a user has run, outside of compiled frames.
    """

    name: str
    param: Any  # nn.Parameter, whose register_hook has no types
    owner: str
    users: tuple[nn.Module, ...]
    compiled: bool
    held: bool = False
    trained: bool = False
    stale: bool = False
    came: bool = False
    left: bool = False
    ran: bool = False

    def arrived(self, _: torch.Tensor) -> None:
        """Note a gradient: a hook of the parameter."""
        self.came = True

    @property
    def is_accused(self) -> bool:
        """True if it should have trained."""
        return self.held and (self.ran or self.left or self.compiled)

    def untrained(self) -> Untrained:
        """Return what the report has of it, with what may be the reason."""
        notes = []
        if not self.held:
            notes.append("not in the optimizer")
        elif self.left:
            notes.append("its gradient stayed on the parameter and was not reduced")
        elif not self.ran and self.compiled:
            notes.append("in a compiled module, where it is not seen to run")
        if self.stale:
            notes.append("stepped with the gradient of an earlier step")
        return Untrained(self.name, self.owner, ", ".join(notes))


def trainables(model: nn.Module) -> list[Trainable]:
    """Return them in the model's order, which is the same on every rank."""
    modules = dict(model.named_modules())
    homes: dict[int, list[str]] = {}
    for name, module in modules.items():
        for param in module.parameters(recurse=False):
            homes.setdefault(id(param), []).append(name)
    params = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            owner = type(modules[homes[id(param)][0]]).__name__
            lines = [_from_user_up(modules, home) for home in homes[id(param)]]
            users = tuple(line[0] for line in lines)
            # `module.compile()`, which is also `engine.compile()`; `torch.compile(module)`.
            compiled = any(
                getattr(module, "_compiled_call_impl", None) or hasattr(module, "_orig_mod")
                for line in lines
                for module in line
            )
            params.append(Trainable(name, param, owner, users, compiled))
    return params


@contextmanager
def watched(model: nn.Module, params: Sequence[Trainable]) -> Iterator[None]:
    """Note at the end of the block for each parameter whether a module that uses it ran."""
    ran: set[nn.Module] = set()

    def note(module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():  # traced as nothing: no side effect, no graph break
            ran.add(module)

    users = {user for param in params for user in param.users}
    # In the model's order: what runs first is then the same from run to run.
    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if m in users]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for param in params:
        param.ran = not ran.isdisjoint(param.users)


def _from_user_up(modules: dict[str, nn.Module], name: str) -> list[nn.Module]:
    """Return the module that uses a parameter of this one, and those around it.

    That is this one, or above a container without a forward, as ParameterList, the first with one.
    """
    line = [modules[name]]
    while name:
        name = name.rpartition(".")[0]
        line.append(modules[name])
    has = ["forward" in vars(m) or type(m).forward is not nn.Module.forward for m in line]
    return line[has.index(True) if True in has else -1 :]
