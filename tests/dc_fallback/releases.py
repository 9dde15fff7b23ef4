"""What this release and this torch can do of DeepCompile."""

from __future__ import annotations

import importlib.util

import pytest


def has_deepcompile() -> bool:
    """0.16.6 and later."""
    return importlib.util.find_spec("deepspeed.compile") is not None


def needs_graphs() -> None:
    """Skip where DeepCompile's graphs cannot be traced on the torch that is installed."""
    from deepspeed.compile import patch_fake_tensor

    if not hasattr(patch_fake_tensor, "_get_guard_sizes_strides"):  # 0.19.0
        pytest.skip("up to 0.18.9 DeepCompile's guards on parameters fail on torch 2.13")
