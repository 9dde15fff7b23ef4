"""Module hooks that are taken away for a while, and put back where they were. Plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class SuspendedHooks:
    """Hooks of modules, by the handles that their registration returned."""

    def __init__(self, handles: Iterable[Any]) -> None:
        """Take the hooks out. A handle whose hook or module is gone is left out."""
        taken: dict[int, tuple[dict[int, Any], set[int]]] = {}
        for handle in handles:
            registry = handle.hooks_dict_ref()
            if registry is not None and handle.id in registry:
                taken.setdefault(id(registry), (registry, set()))[1].add(handle.id)
        self._taken = [(registry, dict(registry), keys) for registry, keys in taken.values()]
        for registry, _, keys in self._taken:
            for key in keys:
                del registry[key]

    def restore(self) -> None:
        """Put them back, in their old order among the others, which may have changed since."""
        for registry, before, keys in self._taken:
            now = dict(registry)
            registry.clear()
            registry.update((k, v) for k, v in before.items() if k in keys or k in now)
            registry.update((k, v) for k, v in now.items() if k not in before)
        self._taken = []
