"""Fixes, at run time, releases of DeepSpeed that drop gradients without an error.

    import ds_patches
    ds_patches.apply_all()      # above deepspeed.initialize

Importing this package is cheap: applying imports torch, DeepSpeed and wrapt.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers read it; `typing` itself is dear at start-up
if TYPE_CHECKING:
    from typing import Any

    from ds_patches.core.api import (
        apply,
        apply_all,
        is_applied,
        names,
        status,
        unapply,
        unapply_all,
    )
    from ds_patches.core.errors import (
        DsPatchesError,
        FlagError,
        OtherRankFailed,
        PatchNotApplied,
        RanksDisagree,
        Refused,
        UnknownPatch,
    )
    from ds_patches.core.state import PatchStatus, State, Statuses
    from ds_patches.cures import (  # noqa: F401
        fp32_buffers,
        frozen_weights,
        half_without_zero,
        moe_gates,
        parameter_layouts,
        pipelines,
        schedules,
        ulysses,
        universal_checkpoint,
        weights_by_hand,
        zero3_gather_once,
        zero3_hooks,
        zero3_weights,
        zero12_gradients,
    )
    from ds_patches.diagnostics.traincheck import NotChecked, NotTrained, TrainReport, train_check

__version__ = "0.4.0"

__all__ = [
    "DsPatchesError",
    "FlagError",
    "NotChecked",
    "NotTrained",
    "OtherRankFailed",
    "PatchNotApplied",
    "PatchStatus",
    "RanksDisagree",
    "Refused",
    "State",
    "Statuses",
    "TrainReport",
    "UnknownPatch",
    "__version__",
    "apply",
    "apply_all",
    "is_applied",
    "names",
    "status",
    "train_check",
    "unapply",
    "unapply_all",
]


def _load(name: str) -> Any:
    """Return a public name, or the module of a cure; Python calls this on its first use."""
    from importlib import import_module
    from importlib.util import find_spec

    if name in __all__:
        for path in ("core.api", "core.errors", "core.state", "diagnostics.traincheck"):
            module = import_module(f"{__name__}.{path}")  # the last one imports torch
            if hasattr(module, name):
                return getattr(module, name)
    if not name.startswith("_") and find_spec(cure := f"{__name__}.cures.{name}"):
        return import_module(cure)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # to a type checker, a module with this has every name
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted(__all__)
