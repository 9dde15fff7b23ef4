"""Which trainable parameters a model has, and which of their modules run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Trainable:
    """A parameter with `requires_grad`, and the modules whose forward would use it."""

    name: str
    param: nn.Parameter
    owner: str  # class of the module that has it
    users: tuple[nn.Module, ...]  # more than one where it is tied
    compiled: bool  # some user is compiled, or below one that is: no hook of it runs


def trainables(model: nn.Module) -> list[Trainable]:
    """Return them in the model's order, which is the same on every rank."""
    owners: dict[int, list[str]] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), []).append(name)
    found = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            homes = owners[id(param)]
            owner = type(modules[homes[0]]).__name__
            names = [_user(modules, home) for home in homes]
            compiled = any(_is_compiled(modules, user) for user in names)
            users = tuple(modules[user] for user in names)
            found.append(Trainable(name, param, owner, users, compiled))
    return found


@contextmanager
def watched(model: nn.Module, found: Sequence[Trainable]) -> Iterator[Callable[[Trainable], bool]]:
    """Yield whether a module of this parameter has run in the block so far.

    A module that runs inside a compiled frame is not seen.
    """
    ran: set[nn.Module] = set()

    def note(module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():  # traced as nothing: no side effect, no graph break
            ran.add(module)

    users = {user for trainable in found for user in trainable.users}
    # In the model's order: what runs first is then the same from run to run.
    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if m in users]
    try:
        yield lambda trainable: not ran.isdisjoint(trainable.users)
    finally:
        for hook in hooks:
            hook.remove()


def _user(modules: dict[str, nn.Module], name: str) -> str:
    """Return who uses a module: of a container without a forward, as ParameterList, one above."""
    return next((one for one in _upwards(name) if _has_forward(modules[one])), "")


def _has_forward(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _is_compiled(modules: dict[str, nn.Module], name: str) -> bool:
    above = [modules[one] for one in _upwards(name)]
    # `module.compile()`, which is also `engine.compile()`; `torch.compile(module)`.
    called = any(getattr(one, "_compiled_call_impl", None) is not None for one in above)
    return called or any(hasattr(one, "_orig_mod") for one in above)


def _upwards(name: str) -> Iterator[str]:
    """Yield the name of a module, and of those around it, up to the model's."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name
