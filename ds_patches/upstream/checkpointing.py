"""What a checkpoint saves in its forward, and gives up when it recomputes.

``checkpoint`` keeps it in attributes of its autograd node, ``non_reentrant_checkpoint`` in
variables that its inner functions share. The names are the same in both, and in all releases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_TENSORS = "deepspeed_saved_tensors"
_GIVEN_UP = (_TENSORS, "non_tensor_args", "tensor_flags")
_RNG_STATES = "fwd_cuda_rng_state_tracker"


class Variables:
    """Variables that a function shares with the one around it, as attributes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        vars(self)["_cells"] = dict(cells)

    def __getattr__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def __setattr__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value


class Saved:
    """All that a checkpoint has saved, as its forward left it.

    owner: the autograd node, or the `Variables`.
    """

    def __init__(self, owner: Any) -> None:
        self._values = {name: getattr(owner, name) for name in _GIVEN_UP}
        # A recomputation that draws from a tracked generator changes the dict.
        self._rng_states = dict(getattr(owner, _RNG_STATES))
        # A tensor that was partitioned or moved to the CPU is empty until the recomputation.
        self._elsewhere = [
            (tensor, tensor.data, tensor.saved_data)
            for tensor in self._values[_TENSORS]
            if getattr(tensor, "saved_data", None) is not None
        ]

    def put_back(self, owner: Any) -> None:
        for name, value in self._values.items():
            setattr(owner, name, value)
        setattr(owner, _RNG_STATES, dict(self._rng_states))
        for tensor, data, saved_data in self._elsewhere:
            tensor.data, tensor.saved_data = data, saved_data


def is_whole(owner: Any) -> bool:
    """Return True if the owner of `Saved` has given nothing up."""
    return getattr(owner, _TENSORS) is not None


def node_of(outputs: Any) -> Any:
    """Return the autograd node of what ``checkpoint`` returned, or None where nothing trains."""
    every = outputs if isinstance(outputs, tuple) else (outputs,)
    nodes = (output.grad_fn for output in every if isinstance(output, torch.Tensor))
    return next((node for node in nodes if hasattr(node, _TENSORS)), None)
