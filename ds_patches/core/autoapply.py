"""Applying by environment: once DeepSpeed, or the part of it that a patch wraps, is imported.

A failure is open: the program runs on unpatched, with one warning for each patch. In strict mode
it ends the program. Nothing here raises into the import it runs in.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ds_patches.core import api, flags, gate, imports, lifecycle, log, registry, release
from ds_patches.core.errors import PatchNotApplied
from ds_patches.core.patch import Patch

_logger = logging.getLogger("ds_patches")


def begin() -> None:
    """Apply what the environment wants, now that DeepSpeed is imported."""
    api.after_the_call(_begin)


def _begin() -> None:
    """A patch none of whose modules DeepSpeed has imported waits for the first of them."""
    log.say()  # also of flags that mean nothing, which are read next
    with _open():
        patches = registry.patches()
        requests = flags.read(patches)
        wanted = [patch for name, patch in patches.items() if requests.of[name].wanted]
        if wanted and all(lifecycle.lives[patch.name].reverted for patch in wanted):
            return  # the program took them back already
        due = {}
        for name, patch in patches.items():
            request = requests.of[name]
            if (life := lifecycle.lives[name]).reverted:
                continue
            if not (modules := _absent_modules(patch, request.force) if request.wanted else []):
                due[name] = patch
                continue
            life.waits_for = modules
            for module in modules:
                imports.add_post_import_hook(
                    module, partial(api.after_the_call, partial(_apply_late, patch))
                )
        api.apply_wanted(due, requests, {})


def _apply_late(patch: Patch) -> None:
    """Apply a patch that has waited, unless another of its modules is just being imported."""
    modules = {target.module for target in patch.targets} & set(sys.modules)
    if lifecycle.lives[patch.name].reverted or not all(map(imports.is_whole, modules)):
        return
    with _open():
        api.apply_wanted({patch.name: patch}, flags.read(registry.patches()), {})


def _absent_modules(patch: Patch, force: gate.Force) -> list[str]:
    """Return the modules the patch may wait for; none if it can be applied, or refused, now."""
    if any(target.module in sys.modules for target in patch.targets):
        return []  # most patches: nothing is asked of the gate that applying will not ask again
    verdict = gate.check(patch, force)
    if not verdict.may_apply or verdict.release is None:
        return []
    return list(dict.fromkeys(target.module for target in gate.targets(patch, verdict.release)))


@contextmanager
def _open() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if flags.is_strict():
            if threading.current_thread() is not threading.main_thread():
                _logger.critical("%s", error)  # Python says nothing of a thread that exits
            raise SystemExit(f"ds_patches: {error} ({flags.PREFIX}_STRICT)") from error
        if not isinstance(error, PatchNotApplied):  # of those it has been warned
            _logger.warning("nothing is applied to %s: %s", release.PACKAGE, error)
            _logger.debug("auto-apply failed", exc_info=error)
