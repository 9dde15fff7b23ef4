"""The command line: `ds-patches COMMAND`, which is `python -m ds_patches COMMAND`."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.version import Version

import ds_patches
from ds_patches.commands.explain import page
from ds_patches.core import api, flags, registry
from ds_patches.core.errors import DsPatchesError, FlagError, nearest
from ds_patches.core.state import Statuses

_EXAMPLES = """\
examples:
  ds-patches explain "mat2 must be a matrix" --release 0.18.4
  ds-patches doctor --json --config ds_config.json
  ds-patches prove outputs
  ds-patches run -- torchrun train.py

all errors and what helps: {page}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 2 for a flag that means nothing."""
    # Python has it ignored: a reader that goes away would be a traceback here, and what `run`
    # becomes would ignore it too.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parser, commands = _parser()
    words = sys.argv[1:] if arguments is None else arguments
    _must_be_known(parser, words)
    chosen, others = parser.parse_known_args(words)
    if others:
        options = re.findall(r"--[\w-]+", commands[chosen.command].format_help())
        parser.error(f"{others[0]} means nothing{nearest(others[0], options)}")
    if chosen.command is None:
        parser.print_help()
        return 0
    try:
        return int(_COMMANDS[chosen.command](chosen) or 0)
    except DsPatchesError as error:
        if getattr(chosen, "json", False):
            print(json.dumps({"status": 2, "error": str(error)}, indent=2))
        print(f"ds_patches: {error}", file=sys.stderr)
        return 2


def _status(chosen: argparse.Namespace) -> None:
    from ds_patches.commands import status

    statuses = api.status()
    if chosen.name is not None:
        patch = registry.patch(chosen.name, "status")
        statuses = Statuses({patch.name: statuses[patch.name]})
    if chosen.json:
        print(json.dumps({n: s.as_json() for n, s in statuses.items()}, indent=2))
    elif chosen.verbose or chosen.name is not None:
        print("\n\n".join(map(status.in_full, statuses.values())))
    else:
        print(statuses)


def _doctor(chosen: argparse.Namespace) -> int:
    from ds_patches.commands import doctor

    return doctor.diagnose(
        chosen.config, chosen.release, verbose=chosen.verbose, as_json=chosen.json
    )


def _explain(chosen: argparse.Namespace) -> int:
    from ds_patches.commands import explain

    if chosen.text is None and sys.stdin.isatty():
        raise FlagError('explain needs a text: ds-patches explain "ERROR", or explain < job.log')
    text = sys.stdin.buffer.read().decode(errors="replace") if chosen.text is None else chosen.text
    return explain.explain(text, chosen.release, verbose=chosen.verbose, as_json=chosen.json)


def _prove(chosen: argparse.Namespace) -> int:
    from ds_patches.commands import prove

    if chosen.name is None:
        return prove.listed()
    return prove.prove(chosen.name, chosen.svg, script=chosen.script)


def _run(chosen: argparse.Namespace) -> None:
    from ds_patches.startup import command

    flags.read(registry.patches())  # one that means nothing: a program would run on unpatched
    for hint in flags.misspelt(os.environ):
        print(f"ds_patches: {hint}", file=sys.stderr)
    words = chosen.words[1:] if chosen.words[:1] == ["--"] else chosen.words
    command.run(words, os.environ)


def _enable(chosen: argparse.Namespace) -> None:
    from ds_patches.startup import site_packages

    print(f"ds_patches: enabled by {site_packages.enable()}")
    print("ds_patches: nothing changes until a job sets DS_PATCHES=all")


def _disable(chosen: argparse.Namespace) -> None:
    from ds_patches.startup import site_packages

    file = site_packages.disable()
    print(f"ds_patches: removed {file}" if file else "ds_patches: it was not enabled")


def _env(chosen: argparse.Namespace) -> None:
    from ds_patches.startup import variables
    from ds_patches.startup.site_packages import StartupError

    if not chosen.remove:
        flags.read(registry.patches())
    try:
        if chosen.remove:
            if not variables.remove(chosen.remove):
                print(f"ds_patches: there is no file {chosen.remove}")
        elif chosen.write:
            variables.write(chosen.write, os.environ)
    except OSError as error:
        raise StartupError(f"{error.filename} cannot be written: {error.strerror}") from error
    if not (chosen.remove or chosen.write):
        print(*variables.lines(os.environ), sep="\n")


_COMMANDS = {
    "explain": _explain,
    "doctor": _doctor,
    "prove": _prove,
    "run": _run,
    "status": _status,
    "enable": _enable,
    "disable": _disable,
    "env": _env,
}


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser, and that of each command."""
    parser = argparse.ArgumentParser(
        prog="ds-patches",
        description=(ds_patches.__doc__ or "").partition("\n")[0],
        epilog=_EXAMPLES.format(page=page()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {ds_patches.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    explain = commands.add_parser("explain", help="say what an error is, and what helps")
    explain.add_argument("text", nargs="?", metavar="TEXT", help="an error, a file or a question")
    explain.add_argument(
        "--release", type=Version, metavar="X.Y.Z", help="default: as in the log, or installed"
    )
    explain.add_argument("-v", "--verbose", action="store_true", help="print the page on it, too")
    explain.add_argument("--json", action="store_true", help="print JSON")
    doctor = commands.add_parser("doctor", help="say what this DeepSpeed gets wrong")
    doctor.add_argument(
        "--config", type=Path, metavar="FILE", help="DeepSpeed's JSON, or a framework's YAML"
    )
    doctor.add_argument("--release", type=Version, metavar="X.Y.Z", help="default: as installed")
    doctor.add_argument("-v", "--verbose", action="store_true", help="add what the script decides")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    prove = commands.add_parser(
        "prove",
        help="train a defect on two CPU ranks: stock, patched and plain PyTorch",
        epilog="exit status: 0, patched is right, stock or not; 1, patched is wrong; 2, not known",
    )
    prove.add_argument("name", nargs="?", metavar="NAME", help="of a proof; else list them")
    prove.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw the losses (needs matplotlib)"
    )
    prove.add_argument("--script", action="store_true", help="print the script, for an issue")
    run = commands.add_parser("run", help="run a command, and all that it starts, patched")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    status = commands.add_parser("status", help="list the patches: name, state, reason")
    status.add_argument("name", nargs="?", metavar="NAME", help="say all about one patch")
    status.add_argument("-v", "--verbose", action="store_true", help="say all about every patch")
    status.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser("enable", help="let jobs of this environment be patched by DS_PATCHES=all")
    commands.add_parser("disable", help="undo enable")
    env = commands.add_parser("env", help="print the variables that other hosts need")
    file = env.add_mutually_exclusive_group()
    for option, effect in (("--write", "put them into"), ("--remove", "remove them from")):
        file.add_argument(
            option,
            nargs="?",
            type=Path,
            const=Path(".deepspeed_env"),
            metavar="FILE",
            help=f"{effect} the file of DeepSpeed's launchers (default: %(const)s)",
        )
    return parser, commands.choices


def _must_be_known(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in _COMMANDS:
        valid = ", ".join(_COMMANDS)
        parser.error(f"no command is {name!r}{nearest(name, _COMMANDS)}; the commands are: {valid}")


if __name__ == "__main__":
    sys.exit(main())
