"""Parameters that are gathered together, and the module calls that they are gathered for.

Both are there for the ranks' sake: a gather is a collective, so how many there are must not hang on
data that differs by rank. Within one call of a module a parameter is gathered once, however often
the code reads it (a loop over the experts that were hit reads it as often as there are such
experts); and all parameters below a ZeRO-3 leaf module are gathered at the first use of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


class Units:
    """The parameters that are gathered, and reduced, together with each; mostly itself alone.

    leaves: the parameters below each leaf module, in an order that is the same on every rank.
    """

    def __init__(self, leaves: Iterable[Iterable[torch.nn.Parameter]] = ()) -> None:
        units = map(tuple, leaves)
        self._units = {param: unit for unit in units for param in unit}

    def of(self, param: torch.nn.Parameter) -> Sequence[torch.nn.Parameter]:
        return self._units.get(param, (param,))


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
