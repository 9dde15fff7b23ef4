"""What `doctor` says of the start-up hook."""

from __future__ import annotations

import os
import sys

from ds_patches.core import imports, release
from ds_patches.startup import command, site_packages


def is_armed() -> bool:
    """Whether DeepSpeed is patched when it is imported in this interpreter."""
    return bool(imports.awaited([release.PACKAGE])) or release.PACKAGE in sys.modules


def lines() -> list[str]:
    """Say whether patches are applied by themselves here, and what stands in the way."""
    wanted = os.environ.get("DS_PATCHES", "")
    hooks = {
        f"enabled by {site_packages.file()}": site_packages.is_enabled(),
        f"on PYTHONPATH: {command.HOOK}": str(command.HOOK) in sys.path,
    }
    here = [hook for hook, is_there in hooks.items() if is_there]
    found = [f"hook: {', '.join(here) or 'none (ds-patches enable, or run)'}"]
    if wanted or here:
        found.append(f"DS_PATCHES: {wanted or 'not set, so nothing is applied by itself'}")
    if wanted and here:
        found.append(f"this interpreter: {'armed' if is_armed() else _why_not_armed()}")
    return found


def _why_not_armed() -> str:
    for flag, option in (("no_site", "-S"), ("isolated", "-I"), ("ignore_environment", "-E")):
        if getattr(sys.flags, flag):
            return f"not armed, it was started with {option}"
    prefix = os.environ.get("DS_PATCHES_PREFIX") or sys.prefix
    if os.path.realpath(prefix) != os.path.realpath(sys.prefix):
        return f"not armed, DS_PATCHES_PREFIX={prefix} is another environment"
    first = getattr(sys.modules.get("sitecustomize"), "__file__", "another sitecustomize.py")
    return f"not armed, {first} comes first on the path"
