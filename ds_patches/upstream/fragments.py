"""Which part of a rank's fp32 weights, and of its optimizer's states, belongs to a parameter.

Stages 1 and 2, and bf16 parameters with fp32 gradients, in all releases.
"""

from __future__ import annotations

from typing import Any


def mappings(optimizer: Any, groups: str) -> list[tuple[Any, Any]]:
    """Return what maps each parameter to its part, and the fp32 weights of its group.

    groups: the name of the optimizer's list of groups. Parameters of other ranks are left out.
    """
    pairs = zip(optimizer.optimizer.param_groups, getattr(optimizer, groups), strict=False)
    return [
        (param._hp_mapping, group["params"][0])
        for group, params in pairs
        for param in params
        if param._hp_mapping is not None
    ]
