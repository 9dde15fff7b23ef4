"""The environment variables under which a program, and all it starts, applies the patches."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ds_patches.core import flags
from ds_patches.startup import site_packages

#: The folder with the sitecustomize.py.
HOOK = Path(__file__).with_name("hook")

#: Of ours the paths; a comma there joins nothing.
_PREFIX, _STATUS = "DS_PATCHES_PREFIX", "DS_PATCHES_STATUS_FILE"


def of_program(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what has to be set for a program started in `environment`; all patches by default.

    Where the environment's own start-up hook is enabled, PYTHONPATH stays as it is.
    """
    ours = {k: v for k, v in environment.items() if flags.is_ours(k)}
    chosen = {"DS_PATCHES": "all"} | {k: v for k, v in ours.items() if v}
    if not site_packages.is_enabled():
        path = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if not _is_hook(p)]
        chosen[_PREFIX] = sys.prefix
        chosen["PYTHONPATH"] = os.pathsep.join([str(HOOK), *filter(None, path)])
    return chosen


def lines(environment: Mapping[str, str]) -> list[str]:
    """Return `of_program` as NAME=value lines, as `.deepspeed_env` takes them.

    Lists are joined by plus signs: DeepSpeed's Slurm launcher hands these values to
    `srun --export`, which splits at commas.
    """
    chosen = of_program(environment)
    for name in chosen:
        if flags.is_ours(name) and name not in (_PREFIX, _STATUS):
            chosen[name] = chosen[name].replace(" ", "").replace(",", "+")
    if "PYTHONPATH" in chosen:
        # DeepSpeed's launchers put the working directory on the path of every node. The line in
        # the file takes the place of that, so it has to hold it.
        hook, _, rest = chosen["PYTHONPATH"].partition(os.pathsep)
        chosen["PYTHONPATH"] = os.pathsep.join(filter(None, [hook, os.getcwd(), rest]))
    return [f"{name}={value}" for name, value in chosen.items()]


def write(file: Path, environment: Mapping[str, str]) -> None:
    """Put the lines into a `.deepspeed_env`; what else it holds stays."""
    others = _others(file)
    # Of two lines the launchers take the last, so ours has to hold what the other one holds.
    path = {k: v for k, v in map(_parted, others) if k == "PYTHONPATH"}
    _put(file, [*others, *lines({**environment, **path})])


def remove(file: Path) -> bool:
    """Take our lines out of a `.deepspeed_env`; the file goes with its last line.

    Returns whether there was a file.
    """
    there = file.exists()
    _put(file, _others(file))
    return there


def _others(file: Path) -> list[str]:
    """Return the lines that are not ours.

    Blank lines are left out: DeepSpeed's launchers stop at a line without "=".
    """
    if not file.exists():
        return []
    found = file.read_bytes().decode(errors="surrogateescape").split("\n")
    return [line for line in found if line.strip() and not _is_ours(*_parted(line))]


def _parted(line: str) -> tuple[str, str]:
    name, _, value = line.partition("=")
    return name.strip(), value.strip()


def _is_ours(name: str, value: str) -> bool:
    hooked = name == "PYTHONPATH" and any(map(_is_hook, value.split(os.pathsep)))
    return hooked or flags.is_ours(name)


def _is_hook(folder: str) -> bool:
    """Whether it is a start-up hook: this one, or that of another copy, which is of no use."""
    return Path(folder).parts[-3:] == HOOK.parts[-3:]


def _put(file: Path, content: list[str]) -> None:
    if content:
        text = "".join(f"{line}\n" for line in content)
        file.write_bytes(text.encode(errors="surrogateescape"))
    else:
        file.unlink(missing_ok=True)
