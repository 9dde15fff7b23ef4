"""The rows: a stage, with overlap_comm or without, stock or patched."""

from __future__ import annotations

PATCH = "stream_safety"
STOCK, PATCHED = "stock", "patched"
MODES = (STOCK, PATCHED)
OVERLAP = {"off": False, "on": True}
PHASES = ("forward", "backward", "step")


def name_of(stage: int, overlap: bool) -> str:
    return f"Z{stage} overlap" if overlap else f"Z{stage}"
