"""Applying by environment, once DeepSpeed is imported.

A failure is open: the program runs on unpatched, with one warning for each patch. In strict mode
it ends the program. Nothing here raises into the import it runs in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ds_patches.core import api, flags, lifecycle, log, registry, release
from ds_patches.core.errors import PatchNotApplied

_logger = logging.getLogger("ds_patches")


def begin() -> None:
    """Apply what the environment wants, now that DeepSpeed is imported."""
    api.after_the_call(_begin)


def _begin() -> None:
    log.say()  # also of flags that mean nothing, which are read next
    with _open():
        patches = registry.patches()
        requests = flags.read(patches)
        wanted = {name for name in patches if requests.of[name].wanted}
        due = {n: patch for n, patch in patches.items() if not lifecycle.lives[n].reverted}
        if not wanted or wanted & due.keys():  # else the program took them back already
            api.apply_wanted(due, requests, {})


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
