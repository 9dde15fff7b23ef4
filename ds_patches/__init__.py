"""Fixes the DeepSpeed you have at run time, where it drops gradients without an error.

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
    from ds_patches.core.state import PatchStatus, State
    from ds_patches.desk.traincheck import NotChecked, NotTrained, TrainReport, train_check

__version__ = "0.3.0"

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


def __getattr__(name: str) -> Any:
    """Load public names and cures on first use, so that importing the package costs nothing."""
    if name in __all__:
        from ds_patches.core import api, errors, state
        from ds_patches.desk import traincheck

        for home in (api, errors, state, traincheck):
            if hasattr(home, name):
                return getattr(home, name)
    if not name.startswith("_"):
        from importlib import import_module
        from importlib.util import find_spec

        if find_spec(cure := f"{__name__}.cures.{name}"):
            return import_module(cure)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
