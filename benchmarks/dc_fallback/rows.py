"""The rows: how ZeRO-3 runs, and how much of the model Dynamo skips."""

from __future__ import annotations

PATCH = "dc_fallback"
#: Of the workload, as the options name them.
SIZES = ("layers", "width", "words", "batch", "tokens", "reduce_bucket_size")

EAGER, STOCK, PATCHED = "eager", "stock", "patched"
#: Eager first: what the others are compared with.
MODES = (EAGER, STOCK, PATCHED)

NOTHING, HALF, ALL = "nothing", "half", "all"
SKIPPED = (NOTHING, HALF, ALL)


def may_fail(mode: str, skipped: str) -> bool:
    """Stock raises or trains wrong where a frame is skipped: that is what the patch is for."""
    return mode == STOCK and skipped != NOTHING
