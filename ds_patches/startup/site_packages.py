"""The start-up hook of an environment: one `.pth` file in its site-packages.

Python runs the `import` lines of such files at its start, also with -I and -E, and before any
sitecustomize, so nothing of the user's has to be found and run. Only -S leaves them out.
"""

from __future__ import annotations

import os
import sysconfig
from contextlib import suppress
from pathlib import Path

from ds_patches.core.errors import DsPatchesError

_NAME = "ds_patches.pth"

#: Frozen, as it may outlive the package, and does nothing then. Of a broken one it says which file
#: is to be removed; once, though Python runs the `.pth` files of a venv twice.
_APPLY_LATER = """
import sys
try:
    from ds_patches.startup import arm
    arm()
except Exception as error:
    gone = getattr(error, "name", None) in ("ds_patches", "ds_patches.startup")
    gone = gone and isinstance(error, ModuleNotFoundError)
    if not gone and sys.stderr is not None and not hasattr(sys, "_ds_patches_told"):
        sys._ds_patches_told = True
        sys.stderr.write(
            f"ds_patches: nothing is patched: the start-up hook {path} is of no use to "
            f"{sys.executable}: {error}; remove that file, or install ds_patches again\\n"
        )
        sys.stderr.flush()
    if not gone and os.environ.get("DS_PATCHES_STRICT", "").lower() in ("1", "true", "yes", "on"):
        os._exit(1)
"""


class StartupError(DsPatchesError):
    """A start-up command cannot do what it is for."""


def file() -> Path:
    """Return where the start-up hook of this environment lies, or would lie."""
    return Path(sysconfig.get_path("purelib"), _NAME)


def is_enabled() -> bool:
    return file().exists()


def enable() -> Path:
    """Give this environment the start-up hook, and return its file.

    Raises StartupError where the environment cannot be written to.
    """
    code = f"path = {str(file())!r}{_APPLY_LATER}"
    line = f'import os; os.environ.get("DS_PATCHES") and exec({code!r}, {{"os": os}})\n'
    part = file().with_suffix(f".{os.getpid()}")
    try:
        part.write_text(line, encoding="utf-8")
        part.replace(file())  # at once: another interpreter may be starting
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise StartupError(
            f"{file()} cannot be written ({error.strerror}); "
            "`ds-patches run -- COMMAND` needs no such file"
        ) from error
    return file()


def disable() -> Path | None:
    """Take the start-up hook away; returns its file, or None if there was none.

    Raises StartupError where the environment cannot be written to.
    """
    if not is_enabled():
        return None
    try:
        file().unlink()
    except OSError as error:
        raise StartupError(f"{file()} cannot be removed: {error.strerror}") from error
    return file()
