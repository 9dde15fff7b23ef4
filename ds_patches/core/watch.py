"""What is looked at when an engine is built, while any patch is applied.

Whether all ranks have the same patches; and whether another library has put something in the
place of a function that a patch wraps. The status looks at the latter anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from ds_patches.core import agreement, engines, imports, lifecycle
from ds_patches.core.flags import Requests
from ds_patches.core.journal import Journal
from ds_patches.core.patch import Target
from ds_patches.core.state import PatchStatus, WrapperState

log = logging.getLogger("ds_patches")

_INIT = Target(engines.MODULE, "DeepSpeedEngine.__init__", "around_init")
_journal = Journal()
#: Of the wrappers that are replaced, what was said: each once.
_said: set[str] = set()


def start(statuses: Iterable[PatchStatus], requests: Requests) -> None:
    """Watch every engine from now on.

    statuses: what has just come of applying patches, as they were requested.
    """
    agreement.prepare(statuses, requests)
    if not _journal.active and not imports.awaited([engines.MODULE]):
        engines.known.update(engines.built())
        imports.add_post_import_hook(engines.MODULE, _wrap)


def stop() -> None:
    """Watch no longer."""
    imports.remove_post_import_hook(engines.MODULE, _wrap)
    _journal.remove()
    engines.known.clear()
    _said.clear()


def _wrap() -> None:
    try:
        _journal.install([_INIT], lambda _: around_init)
    except AttributeError as error:
        log.warning("engines are not looked at: %s", error)


def around_init(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    agreement.compare(engine)
    engines.known.add(engine)
    for patch, life in [*lifecycle.lives.items()]:
        for key, (state, by) in life.wrapper_states().items():
            text = f"{patch}: {key} is replaced by {by}"
            if state is WrapperState.REPLACED and text not in _said:
                _said.add(text)
                log.warning("%s", text)
