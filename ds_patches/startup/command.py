"""`ds-patches run -- COMMAND`: run a command, and all processes that it starts, with patches."""

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


def run(command_line: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command, which then gets its signals and sets its exit status.

    command_line: a program or a Python script, and its arguments.
    Raises StartupError if there is no such command or, in strict mode, if it would run unpatched.
    """
    command = _command(command_line)
    options = itertools.takewhile(lambda option: option.startswith("-"), command[1:])
    if "-S" in options and Path(command[0]).name.startswith("python"):
        problem = (
            "python -S runs no start-up hook, so the command runs unpatched; call "
            "ds_patches.apply_all() in the script"
        )
        if flags.is_strict():
            raise StartupError(f"{problem} ({flags.PREFIX}_STRICT)")
        print(f"ds_patches: {problem}", file=sys.stderr, flush=True)
    # Python ignores this signal; without this line the command would inherit that.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, {**environment, **variables(environment)})
    except OSError as error:
        raise StartupError(f"{command[0]} cannot be run: {error.strerror}") from error


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a program, and every process it starts, apply the patches."""
    patches = {} if environment.get("DS_PATCHES", "").strip() else {"DS_PATCHES": "all"}
    folders = environment.get("PYTHONPATH")
    path = folders.split(os.pathsep) if folders else []  # an empty entry is the working directory
    # Hooks of this and of other copies of the package are dropped: this one comes first.
    remaining = [folder for folder in path if Path(folder).parts[-3:] != HOOK.parts[-3:]]
    return patches | {"PYTHONPATH": os.pathsep.join([str(HOOK), *remaining])}


def _command(command_line: Sequence[str]) -> list[str]:
    if not command_line:
        raise StartupError("run needs a command: ds-patches run -- torchrun train.py")
    program, *arguments = command_line
    if program.endswith(".py"):
        return [sys.executable, program, *arguments]
    # This environment's program first: one of another environment would run unpatched.
    own_scripts = str(Path(sys.executable).parent)
    file = shutil.which(program, path=own_scripts) or shutil.which(program)
    if file is None:
        raise StartupError(f"there is no command {program!r}")
    return [file, *arguments]
