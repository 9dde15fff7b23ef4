"""What is looked at when an engine is built, while any patch is applied.

Whether all ranks have the same patches; and whether another library has put something in the
place of a function that a patch wraps. The status looks at the latter anew.
"""

from __future__ import annotations

import logging
from typing import Any

from ds_patches.core import agreement, engines, imports, lifecycle
from ds_patches.core.flags import Requests
from ds_patches.core.journal import Journal
from ds_patches.core.patch import Target
from ds_patches.core.state import WrapperState

log = logging.getLogger("ds_patches")

_INIT = Target(engines.MODULE, "DeepSpeedEngine.__init__", "around_init")
_journal = Journal()
#: Of the wrappers that are replaced, what was said: each once.
_said: set[str] = set()
_is_on = False


def start(requests: Requests) -> None:
    """Watch every engine from now on; the flags are those that patches were applied with."""
    global _is_on
    _is_on = True
    agreement.prepare(requests)
    if not _journal.is_in_place and not imports.awaited([engines.MODULE]):
        engines.add(*engines.built())
        imports.add_post_import_hook(engines.MODULE, _wrap)


def stop() -> None:
    """Watch no longer."""
    global _is_on
    _is_on = False
    _journal.remove()
    engines.known.clear()
    _said.clear()


def _wrap() -> None:
    if not _is_on:
        return
    try:
        _journal.install([_INIT], lambda _: around_init)
    except AttributeError as error:
        log.warning("engines are not looked at: %s", error)


def around_init(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    agreement.compare(engine)
    engines.add(engine)
    for patch, life in [*lifecycle.lives.items()]:
        for key, (state, by) in life.journal.states().items():
            text = f"{patch}: {key} is replaced by {by}"
            if state is WrapperState.REPLACED and text not in _said:
                _said.add(text)
                log.warning("%s", text)
