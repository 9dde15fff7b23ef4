"""Stage 3 with ``gather_once=True``: what a window has gathered stays until it closes.

Each parameter is then gathered once per window instead of twice per backward. The price is a
whole copy of the parameters, in their own precision, on every rank.
"""

from __future__ import annotations

from typing import Any

from .upstream import engine as upstream_engine
from .upstream import stage3

_KEY = "_ds_patches_coalesce_keeps_gathered"


def keeps(coordinator: Any) -> bool:
    """Whether a coordinator's releases wait for the end of a window."""
    return _KEY in vars(coordinator)


class GatherOnce:
    """Holds the releases of one engine back."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer

    @staticmethod
    def must_be_covered(engine: Any) -> None:
        """Raise NotImplementedError where gathering once is not known to be right."""
        if not upstream_engine.partitions_parameters(engine):
            raise NotImplementedError(
                "gather_once needs ZeRO stage 3: below it nothing is gathered"
            )
        if stage3.has_secondary_partitions(engine):
            raise NotImplementedError("gather_once does not cover zero_hpz_partition_size > 1")

    def begin(self) -> None:
        vars(self._coordinator())[_KEY] = True

    def end(self) -> None:
        """Hold back no longer."""
        vars(self._coordinator()).pop(_KEY, None)

    def release(self) -> None:
        """Release what was held back."""
        stage3.release_gathered(self._optimizer)

    def _coordinator(self) -> Any:
        return self._optimizer.parameter_offload.get_param_coordinator()
