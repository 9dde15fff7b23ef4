"""stream_safety, measured: how much of the reductions a backward hides, stock and patched."""
