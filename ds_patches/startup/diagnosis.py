"""The start-up hook in `doctor`'s report."""

import os
import sys
from importlib.util import find_spec

from ds_patches.core import api, registry
from ds_patches.startup import command

#: The module name of the hook's copy in site-packages.
_INSTALLED = "_ds_patches_hook"


def is_armed() -> bool:
    """Return True if this interpreter has applied patches, or will when it imports DeepSpeed."""
    is_waiting = any(hasattr(finder, "ds_patches") for finder in sys.meta_path)
    return is_waiting or any(map(api.is_applied, registry.patches()))


def lines() -> list[str]:
    """Return lines on whether the hook applies patches in this interpreter, or why it does not."""
    wanted = os.environ.get("DS_PATCHES", "").strip()
    installed = find_spec(_INSTALLED)
    hooks = [f"installed: {installed.origin}"] if installed else []
    hooks += [f"on PYTHONPATH: {command.HOOK}"] if str(command.HOOK) in sys.path else []
    report = [f"hook: {', '.join(hooks) or 'none (install ds_patches by pip, or use run)'}"]
    report.append(f"DS_PATCHES: {wanted or 'not set, so the hook applies nothing'}")
    if wanted and hooks:
        report.append(f"this interpreter: {'armed' if is_armed() else _why_not_armed()}")
    return report


def _why_not_armed() -> str:
    if sys.flags.no_site:
        return "not armed, it was started with -S"
    first = getattr(sys.modules.get("sitecustomize"), "__file__", "another sitecustomize.py")
    return f"not armed, {first} comes first on the path"
