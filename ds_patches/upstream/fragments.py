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


def read_sums(optimizer: Any) -> None:
    """Let a gradient that is asked for be that of the step: the sum, of which ranks have parts.

    Of bf16 parameters with fp32 gradients. A backward leaves its own rank's last gradient there,
    which is found first (to read one, to 0.19.7), and the sums are found whole.
    """
    if getattr(optimizer, "graph_harvesting", False):  # to 0.19.7; its gradients may not move
        return
    kept, sums = optimizer.fp32_groups_gradient_dict, optimizer.fp32_groups_gradients
    for group, params in enumerate(optimizer.bf16_groups):
        if kept[group] is sums[group]:  # as upstream left them
            kept[group] = [None] * len(params)
            for param, whole in zip(params, sums[group], strict=True):
                if param._hp_mapping is not None:
                    part = param._hp_mapping.lp_fragment_address
                    own = whole.view(-1).narrow(0, part.start, part.numel)
                    kept[group][param._index_in_param_group] = own
        for param in params:
            param.grad = None
