"""Tests that need GPUs: two, or one that the ranks share. Without, they are skipped.

    python -m pytest tests/gpu -n 6

A case of DeepCompile has two processes of its own, one per GPU: it leaves too much behind in one.
With pytest-xdist several cases share the GPUs. DeepCompile builds a C++ extension at its first use
(about a minute); ``TORCH_EXTENSIONS_DIR`` keeps it, a folder per release.
"""
