"""`python -m ds_patches run -- COMMAND`: any command, patched, and all that it starts."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ds_patches.core import flags
from ds_patches.startup import site_packages, variables
from ds_patches.startup.site_packages import StartupError

#: Options of Python, of which one is enough to leave the hook out: of PYTHONPATH, of site-packages.
_DEAF_TO_PATH, _DEAF_TO_SITE = frozenset("EIS"), frozenset("S")


def run(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become the command: its signals and its exit code are the caller's.

    words: a program or a Python script, and its arguments.
    Raises StartupError if there is no such command or, in strict mode, if it would run unpatched.
    """
    command = _command(words)
    for doubt in _doubts(command):
        if flags.is_strict():
            raise StartupError(f"{doubt} ({flags.PREFIX}_STRICT)")
        print(f"ds_patches: {doubt}", file=sys.stderr, flush=True)
    chosen = {**environment, **variables.of_program(environment)}
    try:
        os.execvpe(command[0], command, chosen)
    except OSError as error:
        raise StartupError(f"{command[0]} cannot be run: {error.strerror}") from error


def _command(words: Sequence[str]) -> list[str]:
    if not words:
        raise StartupError("run needs a command: python -m ds_patches run -- torchrun train.py")
    first, *rest = words
    if first.endswith(".py"):
        return [sys.executable, first, *rest]
    # This environment's first: a launcher of another one would run unpatched.
    found = shutil.which(first, path=str(Path(sys.executable).parent)) or shutil.which(first)
    if found is None:
        raise StartupError(f"there is no command {first!r}")
    return [found, *rest]


def _doubts(command: Sequence[str]) -> Iterator[str]:
    """Say what keeps the hook from being run, as far as the command tells."""
    enabled = site_packages.is_enabled()
    if deaf := _options(command) & (_DEAF_TO_SITE if enabled else _DEAF_TO_PATH):
        yield (
            f"python -{''.join(sorted(deaf))} runs no start-up hook, so the command runs "
            "unpatched; call ds_patches.apply_all() in the script"
            + ", or use `python -m ds_patches enable`"
            * (not enabled and "S" not in deaf)
        )
    if Path(command[0]).name == "deepspeed" and not enabled and Path("sitecustomize.py").exists():
        yield (
            "the deepspeed launcher puts the working directory first on the path of other hosts, "
            "where sitecustomize.py hides the start-up hook; use `python -m ds_patches enable`"
        )


def _options(command: Sequence[str]) -> set[str]:
    """Return the single-letter options that a Python interpreter is started with."""
    if not Path(command[0]).name.startswith("python"):
        return set()
    letters: set[str] = set()
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word == "-":
            break
        if word.startswith("--"):
            continue
        plain, *valued = re.split("([cmWX])", word[1:], maxsplit=1)
        letters |= set(plain)
        if valued and valued[0] in "cm":  # what follows is the program's
            break
        if valued and not valued[1]:  # the value is the next word
            next(words, None)
    return letters
