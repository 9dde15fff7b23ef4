"""What each patch has: `coalesce.apply()` is `ds_patches.apply("coalesce")`."""

from __future__ import annotations

from functools import partial

from ds_patches.core import api
from ds_patches.core.state import PatchStatus


def of(package: str) -> tuple[partial[PatchStatus], partial[PatchStatus], partial[bool]]:
    """Return `apply`, `unapply` and `is_applied` of the patch that this package or file is."""
    name = package.rpartition(".")[2]
    return partial(api.apply, name), partial(api.unapply, name), partial(api.is_applied, name)
