"""Applies the patches at the end of the import of DeepSpeed; see ds_patches.startup.

Changed rarely, since the interpreter may have another version of ds_patches, or none. Imports no
package at the start of a program. As `sitecustomize` it also runs the next `sitecustomize` on the
path, the user's, since Python runs only the first.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HERE = os.path.dirname(__file__)
NAME = "deepspeed"


class Waiting:
    """First finder on `sys.meta_path` until DeepSpeed is imported, which its own loader loads."""

    ds_patches = "waits for DeepSpeed"
    has_warned, loader = False, None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != NAME:
            return None
        finders = sys.meta_path
        for finder in finders[finders.index(self) + 1 :] if self in finders else ():
            if not hasattr(finder, "find_spec"):  # a finder made for Python 3.3
                continue
            spec: Any = finder.find_spec(name, path, target)
            if spec:
                if hasattr(spec.loader, "exec_module"):  # a bare folder of that name has no loader
                    self.loader, spec.loader = spec.loader, self
                return spec
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def exec_module(self, module: Any) -> None:
        # The module gets the loader that it has without this hook.
        loader: Any = self.loader
        module.__spec__.loader = module.__loader__ = loader
        loader.exec_module(module)
        self.imported()

    def imported(self) -> None:
        """Apply the patches, at the end of the import; if this raises, so does the import."""
        try:
            import ds_patches

            if __name__ == "sitecustomize":
                # By `__path__`: a bare folder of that name has no `__file__`.
                package, own = ds_patches.__path__[0], os.path.dirname(os.path.dirname(HERE))
                if os.path.realpath(package) != os.path.realpath(own):
                    raise ImportError(f"it is of {own}, and this Python imports {package}")
            from ds_patches.startup import apply
        except Exception as error:
            self.refuse(error)
        else:
            apply()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def refuse(self, error: Exception) -> None:
        """Print once why DeepSpeed stays unpatched; end the program in strict mode."""
        if (
            sys.stderr is not None and not self.has_warned
        ):  # None if the program started with it closed
            # One call for the whole line, since other ranks write to the same terminal.
            sys.stderr.write(
                "ds_patches: DeepSpeed is not patched, although DS_PATCHES is set: the hook in "
                f"{HERE} does not work with {sys.executable}: {error}; install ds_patches there\n"
            )
            sys.stderr.flush()
        self.has_warned = True
        if os.environ.get("DS_PATCHES_STRICT", "").strip().lower() in ("1", "true", "yes", "on"):
            raise SystemExit(1)


def run_next_sitecustomize() -> None:
    position = sys.path.index(HERE)
    sys.path.remove(HERE)
    own_module = sys.modules.pop(__name__)
    try:
        # Python reports exceptions of this import, as it does without the hook.
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules[__name__] = own_module  # no other sitecustomize exists
    finally:
        sys.path.insert(position, HERE)


is_wanted = os.environ.get("DS_PATCHES", "").strip() and NAME not in sys.modules
if is_wanted and not any(hasattr(finder, "ds_patches") for finder in sys.meta_path):
    sys.meta_path.insert(0, Waiting())
if __name__ == "sitecustomize":
    run_next_sitecustomize()
