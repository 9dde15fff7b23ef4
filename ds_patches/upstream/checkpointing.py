"""The tensors and states that an activation checkpoint saves, and frees when it recomputes.

``checkpoint`` keeps them in attributes of its autograd node, ``non_reentrant_checkpoint`` in
variables that its inner functions share. The names are the same in both, and in all releases.
"""

from collections.abc import Callable
from typing import Any

import torch

_TENSORS = "deepspeed_saved_tensors"
_FREED = (_TENSORS, "non_tensor_args", "tensor_flags")
_RNG_STATES = "fwd_cuda_rng_state_tracker"


class ClosureVariables:
    """The variables that a function shares with its enclosing function, as attributes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        vars(self)["_cells"] = dict(cells)

    def __getattr__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def __setattr__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value


class SavedState:
    """A copy of what a checkpoint saved in its forward.

    owner: the autograd node, or the `ClosureVariables`.
    """

    def __init__(self, owner: Any) -> None:
        self._values = {name: getattr(owner, name) for name in _FREED}
        # A recomputation that draws from a tracked generator changes the dict in place.
        self._rng_states = dict(getattr(owner, _RNG_STATES))
        # Tensors that were partitioned or moved to the CPU are empty until the recomputation.
        self._offloaded = [
            (tensor, tensor.data, tensor.saved_data)
            for tensor in self._values[_TENSORS]
            if getattr(tensor, "saved_data", None) is not None
        ]

    def restore(self, owner: Any) -> None:
        """Put the saved state back into the node or the closure."""
        for name, value in self._values.items():
            setattr(owner, name, value)
        setattr(owner, _RNG_STATES, dict(self._rng_states))
        for tensor, data, saved_data in self._offloaded:
            tensor.data, tensor.saved_data = data, saved_data


def is_intact(owner: Any) -> bool:
    """Return True if the owner of a `SavedState` has not freed its tensors."""
    return getattr(owner, _TENSORS) is not None


def checkpoint_node(outputs: Any) -> Any:
    """Return the autograd node of ``checkpoint``'s outputs, or None without gradients."""
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    nodes = (output.grad_fn for output in tensors if isinstance(output, torch.Tensor))
    return next((node for node in nodes if hasattr(node, _TENSORS)), None)
