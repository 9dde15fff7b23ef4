"""Patches without a line in the script: what makes an interpreter apply them by itself.

A start-up hook runs `arm` in every interpreter while `DS_PATCHES` is set, and costs nothing while
it is not. There are two ways to have it:

- `python -m ds_patches enable` writes one `.pth` file into the environment (site_packages.py);
- `python -m ds_patches run -- COMMAND` puts the folder `hook`, with a sitecustomize.py that runs
  the user's own next, on the command's PYTHONPATH and so on that of its children (command.py).

`arm` imports neither torch nor DeepSpeed nor wrapt; the patches are applied when DeepSpeed itself
is imported (core/autoapply.py).
"""

from __future__ import annotations

_armed = False


def arm() -> None:
    """Apply the wanted patches once DeepSpeed is imported; calling it again changes nothing."""
    global _armed
    from ds_patches.core import imports

    if not _armed:
        imports.add_post_import_hook("deepspeed", _begin)
        _armed = True


def _begin() -> None:
    from ds_patches.core import autoapply

    autoapply.begin()
