"""The command line: `python -m ds_patches COMMAND`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ds_patches.core import api, locks, report
from ds_patches.core.errors import DsPatchesError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 if `doctor` found a fault, 2 for a flag that means nothing."""
    chosen = _parser().parse_args(arguments)
    try:
        return int(_COMMANDS[chosen.command](chosen) or 0)
    except DsPatchesError as error:
        print(f"ds_patches: {error}", file=sys.stderr)
        return 2


def _status(chosen: argparse.Namespace) -> None:
    if chosen.json:
        print(json.dumps({n: s.as_json() for n, s in api.status().items()}, indent=2))
    else:
        print(report.status(api.status().values(), colour=sys.stdout.isatty()))


def _doctor(chosen: argparse.Namespace) -> int:
    from ds_patches.startup import diagnosis

    text, drifted = report.doctor()
    print(text, "", "start-up", *(f"  {line}" for line in diagnosis.lines()), sep="\n")
    if found := locks.lines(os.environ):
        _say(f"warning: {line}" for line in found)
    sound = [not drifted]
    if chosen.train_check:
        sound.append(_trains(chosen.timeout))
    if chosen.streams:
        sound.append(_is_equal_on_streams(chosen.timeout))
    return int(not all(sound))


def _trains(seconds: float) -> bool:
    from ds_patches.traincheck import doctor

    trial = doctor.Diagnosis(os.environ, seconds)
    _say(trial.lines())
    return trial.trains


def _is_equal_on_streams(seconds: float) -> bool:
    from ds_patches.streamcheck import doctor

    trial = doctor.Diagnosis(os.environ, seconds)
    _say(trial.lines())
    return trial.equal


def _say(lines: Iterable[str]) -> None:
    """Print a paragraph line by line, as they come."""
    print(flush=True)
    for line in lines:
        print(line, flush=True)


def _table(chosen: argparse.Namespace) -> None:
    print(report.table())


def _run(chosen: argparse.Namespace) -> None:
    from ds_patches.startup import command

    words = chosen.words[1:] if chosen.words[:1] == ["--"] else chosen.words
    command.run(words, os.environ)


def _enable(chosen: argparse.Namespace) -> None:
    from ds_patches.startup import site_packages

    print(f"ds_patches: enabled by {site_packages.enable()}")
    print(f"ds_patches: DS_PATCHES=all now patches every program of {sys.prefix}")


def _disable(chosen: argparse.Namespace) -> None:
    from ds_patches.startup import site_packages

    file = site_packages.disable()
    print(f"ds_patches: removed {file}" if file else "ds_patches: was not enabled")


def _env(chosen: argparse.Namespace) -> None:
    from ds_patches.startup import variables

    if chosen.write:
        variables.write(chosen.write, os.environ)
    elif chosen.remove:
        variables.remove(chosen.remove)
    else:
        print(*variables.lines(os.environ), sep="\n")


_COMMANDS = {
    "status": _status,
    "doctor": _doctor,
    "table": _table,
    "run": _run,
    "enable": _enable,
    "disable": _disable,
    "env": _env,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ds_patches", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="one line per patch: state, release, why, links")
    status.add_argument("--json", action="store_true", help="the same as JSON")
    doctor = commands.add_parser("doctor", help="environment, what would apply and why not, drift")
    doctor.add_argument(
        "--train-check",
        action="store_true",
        help="train a small model too, and name parameters that get no gradient",
    )
    doctor.add_argument(
        "--streams",
        action="store_true",
        help="train a small pipeline on the GPUs too, with CUDA streams and without, and compare",
    )
    doctor.add_argument(
        "--timeout",
        type=float,
        default=120,
        metavar="SECONDS",
        help="for each training of --train-check, and for all of --streams (default: %(default)s)",
    )
    commands.add_parser("table", help="the patches as a markdown table")
    run = commands.add_parser("run", help="run a command patched, and all that it starts")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    commands.add_parser("enable", help="let DS_PATCHES patch every program of this environment")
    commands.add_parser("disable", help="take that back")
    env = commands.add_parser("env", help="the variables that other hosts need, as NAME=value")
    file = env.add_mutually_exclusive_group()
    for option, effect in (("--write", "put them into"), ("--remove", "take them out of")):
        file.add_argument(
            option,
            nargs="?",
            type=Path,
            const=Path(".deepspeed_env"),
            metavar="FILE",
            help=f"{effect} the file of DeepSpeed's launchers (default: %(const)s)",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
