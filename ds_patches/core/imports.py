"""Modules as they are imported: which are whole, and what is to happen when one becomes so.

Auto-apply loads this at every start of an interpreter: it imports nothing that a bare interpreter
has not loaded already.
"""

from __future__ import annotations

import sys
from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Hook = Callable[[], None]


def is_whole(module: str) -> bool:
    """Whether `module` is imported, wholly: a half-imported one has half of its names."""
    found = sys.modules.get(module)
    if found is None:
        return False
    spec = getattr(found, "__spec__", None)  # anything may stand in for a module
    return module in _watch.executed or not getattr(spec, "_initializing", False)


def add_post_import_hook(module: str, hook: Hook) -> None:
    """Run `hook` right after the body of `module` has been run: now, or at its import.

    What `hook` raises, the import raises. If the import fails, by that or by itself, the wait
    goes on.
    Raises ImportError for a module that is half imported: nothing tells when that one ends.
    """
    if is_whole(module):
        hook()
    elif module in sys.modules:
        raise ImportError(f"{module} is half imported")
    else:
        _watch.wait(module, [hook])


def awaited(modules: Iterable[str]) -> list[str]:
    """Return those of `modules` whose import something waits for."""
    return [module for module in modules if module in _watch.hooks]


class _Loader:
    """Loads a module as another loader does, and tells when its body has been run."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        """Whatever else a loader can do, this one can as the other does."""
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        # From here on the module has the loader that it would have without us.
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _watch.arrived(module.__name__)


class _Watch:
    """Stands first on `sys.meta_path` while something is awaited; finds nothing by itself."""

    def __init__(self) -> None:
        #: Modules are imported in threads. No hook, and no import, runs while it is held.
        self.lock = RLock()
        self.hooks: dict[str, list[Hook]] = {}
        #: Their bodies have been run, though the import system still calls them half imported.
        self.executed: set[str] = set()

    def wait(self, name: str, hooks: Sequence[Hook]) -> None:
        with self.lock:
            self.hooks.setdefault(name, []).extend(hooks)
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.hooks:
            return None
        with self.lock:
            found = sys.meta_path
            behind = found[found.index(self) + 1 :] if self in found else ()
        for finder in behind:
            if not hasattr(finder, "find_spec"):  # as of Python 3.3
                continue
            if spec := finder.find_spec(name, path, target):
                if hasattr(spec.loader, "exec_module"):  # not so a bare folder of that name
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None

    def arrived(self, name: str) -> None:
        with self.lock:
            self.executed.add(name)
            hooks = self.hooks.pop(name, [])
        try:
            for hook in hooks:
                hook()
        except BaseException:
            self.wait(name, hooks)
            raise
        finally:
            with self.lock:
                self.executed.discard(name)
                if not self.hooks and self in sys.meta_path:
                    sys.meta_path.remove(self)


_watch = _Watch()
