"""What Python runs at its start while this folder is on PYTHONPATH: see ds_patches.startup.

Frozen: it may meet another ds_patches, or none. Python runs only the first sitecustomize on its
path, so this one runs the next, which is the user's.
"""

import os
import sys

HERE = os.path.dirname(__file__)


def apply_later() -> None:
    if not os.environ.get("DS_PATCHES") or is_foreign():
        return
    try:
        import ds_patches

        # By the path: a bare folder of that name has no file.
        theirs, ours = ds_patches.__path__[0], os.path.dirname(os.path.dirname(HERE))
        if os.path.realpath(theirs) != os.path.realpath(ours):
            raise ImportError(f"it belongs to {ours}, and this Python has {theirs}")
        from ds_patches.startup import arm

        arm()
    except Exception as error:
        if sys.stderr is not None:  # it was started with it closed
            # One call for the whole line: other ranks write to the same terminal.
            sys.stderr.write(
                f"ds_patches: nothing is patched: the start-up hook on PYTHONPATH, {HERE}, "
                f"is of no use to {sys.executable}: {error}\n"
            )
            sys.stderr.flush()
        if os.environ.get("DS_PATCHES_STRICT", "").lower() in ("1", "true", "yes", "on"):
            os._exit(1)  # SystemExit, here, is a crash of the interpreter with its own page of text


def is_foreign() -> bool:
    """PYTHONPATH is inherited by programs of other environments too."""
    prefix = os.environ.get("DS_PATCHES_PREFIX") or sys.prefix
    return os.path.realpath(prefix) != os.path.realpath(sys.prefix)


def run_the_next() -> None:
    place = sys.path.index(HERE)
    sys.path.remove(HERE)
    this = sys.modules.pop(__name__)
    try:
        # What it raises is Python's to report, as it would without this hook.
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules[__name__] = this  # there is no other
    finally:
        sys.path.insert(place, HERE)


apply_later()
run_the_next()
