"""Tests that need GPUs; without two of them all are skipped.

    python -m pytest tests/gpu -n 6

Each case has two processes of its own, one per GPU: DeepCompile leaves too much behind in one. With
pytest-xdist several cases share the GPUs. DeepCompile builds a C++ extension at its first use
(about a minute); ``TORCH_EXTENSIONS_DIR`` keeps it, a folder per release.
"""
