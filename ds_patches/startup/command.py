"""`ds-patches run -- COMMAND`: run a command, and all that it starts, with the patches."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ds_patches.core import flags
from ds_patches.core.errors import DsPatchesError

#: The folder with the sitecustomize.py.
HOOK = Path(__file__).with_name("hook")


class StartupError(DsPatchesError):
    """`ds-patches run` cannot run the command, or cannot patch it."""


def run(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command, which then gets its signals and gives its exit code.

    words: a program or a Python script, and its arguments.
    Raises StartupError if there is no such command or, in strict mode, if it would run unpatched.
    """
    command = _command(words)
    options = itertools.takewhile(lambda word: word.startswith("-"), command[1:])
    if "-S" in options and Path(command[0]).name.startswith("python"):
        doubt = (
            "python -S runs no start-up hook, so the command runs unpatched; call "
            "ds_patches.apply_all() in the script"
        )
        if flags.is_strict():
            raise StartupError(f"{doubt} ({flags.PREFIX}_STRICT)")
        print(f"ds_patches: {doubt}", file=sys.stderr, flush=True)
    # Python ignores this signal, and the command would inherit that.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, {**environment, **variables(environment)})
    except OSError as error:
        raise StartupError(f"{command[0]} cannot be run: {error.strerror}") from error


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables under which a program, and all that it starts, applies the patches."""
    chosen = {} if environment.get("DS_PATCHES", "").strip() else {"DS_PATCHES": "all"}
    given = environment.get("PYTHONPATH")
    path = given.split(os.pathsep) if given else []  # an empty entry is the working directory
    # Without this hook, which comes first, and those of other copies of the package.
    others = [folder for folder in path if Path(folder).parts[-3:] != HOOK.parts[-3:]]
    return chosen | {"PYTHONPATH": os.pathsep.join([str(HOOK), *others])}


def _command(words: Sequence[str]) -> list[str]:
    if not words:
        raise StartupError("run needs a command: ds-patches run -- torchrun train.py")
    first, *rest = words
    if first.endswith(".py"):
        return [sys.executable, first, *rest]
    # This environment's first: a launcher of another environment would run unpatched.
    program = shutil.which(first, path=str(Path(sys.executable).parent)) or shutil.which(first)
    if program is None:
        raise StartupError(f"there is no command {first!r}")
    return [program, *rest]
