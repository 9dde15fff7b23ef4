"""The environment variables under which a program, and all it starts, applies the patches."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ds_patches.startup import site_packages

#: The folder with the sitecustomize.py.
HOOK = Path(__file__).with_name("hook")

_LISTS = ("DS_PATCHES", "DS_PATCHES_SKIP", "DS_PATCHES_FORCE")


def of_program(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what has to be set for a program started in `environment`; all patches by default.

    Where the environment's own start-up hook is enabled, PYTHONPATH stays as it is.
    """
    ours = {
        k: v for k, v in environment.items() if k == "DS_PATCHES" or k.startswith("DS_PATCHES_")
    }
    chosen = {"DS_PATCHES": "all"} | {k: v for k, v in ours.items() if v}
    if not site_packages.is_enabled():
        path = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p != str(HOOK)]
        chosen["DS_PATCHES_PREFIX"] = sys.prefix
        chosen["PYTHONPATH"] = os.pathsep.join([str(HOOK), *filter(None, path)])
    return chosen


def lines(environment: Mapping[str, str]) -> list[str]:
    """Return `of_program` as NAME=value lines, as `.deepspeed_env` takes them.

    Lists are joined by plus signs: DeepSpeed's Slurm launcher hands these values to
    `srun --export`, which splits at commas.
    """
    chosen = of_program(environment)
    for name in _LISTS:
        if name in chosen:
            chosen[name] = chosen[name].replace(" ", "").replace(",", "+")
    if "PYTHONPATH" in chosen:
        # DeepSpeed's launchers put the working directory on the path of every node. The line in
        # the file takes the place of that, so it has to hold it.
        hook, _, rest = chosen["PYTHONPATH"].partition(os.pathsep)
        chosen["PYTHONPATH"] = os.pathsep.join(filter(None, [hook, os.getcwd(), rest]))
    return [f"{name}={value}" for name, value in chosen.items()]


def write(file: Path, environment: Mapping[str, str]) -> None:
    """Put the lines into a `.deepspeed_env`; what else it holds stays."""
    _put(file, [*_others(file), *lines(environment)])


def remove(file: Path) -> None:
    """Take our lines out of a `.deepspeed_env`; the file goes with its last line."""
    _put(file, _others(file))


def _others(file: Path) -> list[str]:
    """Return the lines that are not ours.

    Blank lines are left out: DeepSpeed's launchers stop at a line without "=".
    """
    if not file.exists():
        return []
    found = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [line for line in found if not _is_ours(*line.strip().partition("=")[::2])]


def _is_ours(name: str, value: str) -> bool:
    hooked = name == "PYTHONPATH" and str(HOOK) in value.split(os.pathsep)
    return hooked or _is_flag(name)


def _is_flag(name: str) -> bool:
    return name == "DS_PATCHES" or name.startswith("DS_PATCHES_")


def _put(file: Path, content: list[str]) -> None:
    if content:
        file.write_text("\n".join(content) + "\n", encoding="utf-8")
    else:
        file.unlink(missing_ok=True)
