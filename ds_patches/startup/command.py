"""`ds-patches run -- COMMAND`: any command, patched, and all that it starts."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ds_patches.core import flags
from ds_patches.startup import site_packages
from ds_patches.startup.site_packages import StartupError

#: The folder with the sitecustomize.py.
HOOK = Path(__file__).with_name("hook")


def run(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become the command: its signals and its exit code are the caller's.

    words: a program or a Python script, and its arguments.
    Raises StartupError if there is no such command or, in strict mode, if it would run unpatched.
    """
    command = _command(words)
    if doubt := _doubt(command):
        if flags.is_strict():
            raise StartupError(f"{doubt} ({flags.PREFIX}_STRICT)")
        print(f"ds_patches: {doubt}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python has it ignored, and so would the command
    try:
        os.execvpe(command[0], command, {**_uncoerced(environment), **variables(environment)})
    except OSError as error:
        raise StartupError(f"{command[0]} cannot be run: {error.strerror}") from error


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those under which a program, and all that it starts, applies the patches.

    Where the environment's own start-up hook is enabled, PYTHONPATH stays as it is.
    """
    chosen = {} if environment.get("DS_PATCHES") else {"DS_PATCHES": "all"}
    if not site_packages.is_enabled():
        given = environment.get("PYTHONPATH")
        path = given.split(os.pathsep) if given else []  # an empty entry is the working directory
        chosen["DS_PATCHES_PREFIX"] = sys.prefix
        chosen["PYTHONPATH"] = os.pathsep.join([str(HOOK), *(p for p in path if not _is_hook(p))])
    return chosen


def _uncoerced(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the LC_CTYPE that was given: in the C locale Python sets it."""
    found = {**environment}
    with suppress(OSError):
        given = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
        found.pop("LC_CTYPE", None)
        found |= dict(one.split("=", 1) for one in given if one.startswith("LC_CTYPE="))
    return found


def _is_hook(folder: str) -> bool:
    """Whether it is a start-up hook: this one, or that of another copy, which is of no use."""
    return Path(folder).parts[-3:] == HOOK.parts[-3:]


def _command(words: Sequence[str]) -> list[str]:
    if not words:
        raise StartupError("run needs a command: ds-patches run -- torchrun train.py")
    first, *rest = words
    if first.endswith(".py"):
        return [sys.executable, first, *rest]
    # This environment's first: a launcher of another one would run unpatched.
    found = shutil.which(first, path=str(Path(sys.executable).parent)) or shutil.which(first)
    if found is None:
        raise StartupError(f"there is no command {first!r}")
    return [found, *rest]


def _doubt(command: Sequence[str]) -> str:
    """Say what keeps the hook from being run, as far as the command tells."""
    if not Path(command[0]).name.startswith("python"):
        return ""
    # Without the hook in site-packages it is that on PYTHONPATH.
    deaf = {"-S"} if site_packages.is_enabled() else {"-E", "-I", "-S"}
    options = itertools.takewhile(lambda word: word.startswith("-"), command[1:])
    if not (option := next(filter(deaf.__contains__, options), "")):
        return ""
    return (
        f"python {option} runs no start-up hook, so the command runs unpatched; call "
        "ds_patches.apply_all() in the script"
    )
