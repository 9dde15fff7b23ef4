"""Parameters that are gathered together, and the module calls that they are gathered for.

Both are there for the ranks' sake: a gather is a collective, so how many there are must not hang on
data that differs by rank. Within one call of a module a parameter is gathered once, however often
the code reads it (a loop over the experts that were hit reads it as often as there are such
experts); and all parameters below a ZeRO-3 leaf module are gathered at the first use of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Unit:
    """Parameters that are gathered, and reduced, together; mostly one.

    params: in an order that is the same on every rank.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        self.params = tuple(params)

    @property
    def trained(self) -> tuple[torch.nn.Parameter, ...]:
        """Those that get gradients."""
        return tuple(param for param in self.params if param.requires_grad)


class Units:
    """The unit of each parameter.

    leaves: the parameters below each leaf module. All others are units of their own.
    """

    def __init__(self, leaves: Iterable[Iterable[torch.nn.Parameter]] = ()) -> None:
        self._units: dict[torch.nn.Parameter, Unit] = {}
        for params in leaves:
            unit = Unit(params)
            self._units.update(dict.fromkeys(unit.params, unit))

    def of(self, param: torch.nn.Parameter) -> Unit:
        unit = self._units.get(param)
        if unit is None:
            unit = self._units[param] = Unit([param])
        return unit


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

    @property
    def innermost(self) -> Call:
        return self[-1]

    def open(self, module: Any) -> Call:
        self.append(Call(module))
        return self.innermost

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
