"""The command line: `ds-patches COMMAND`, which is `python -m ds_patches COMMAND`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from packaging.version import Version

import ds_patches
from ds_patches.core import api, flags, registry
from ds_patches.core.errors import DsPatchesError, FlagError
from ds_patches.core.state import Statuses
from ds_patches.desk.sections import page

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
    chosen = _parser().parse_args(arguments)
    try:
        return int(chosen.act(chosen) or 0)
    except DsPatchesError as error:
        if getattr(chosen, "json", False):
            print(json.dumps({"status": 2, "error": str(error)}, indent=2))
        print(f"ds_patches: {error}", file=sys.stderr)
        return 2


def _status(chosen: Namespace) -> None:
    from ds_patches.desk import status

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


def _doctor(chosen: Namespace) -> int:
    from ds_patches.desk import doctor

    return doctor.diagnose(
        chosen.config, chosen.release, verbose=chosen.verbose, as_json=chosen.json
    )


def _explain(chosen: Namespace) -> int:
    from ds_patches.desk import explain

    if chosen.text is None and sys.stdin.isatty():
        raise FlagError('explain needs a text: ds-patches explain "ERROR", or explain < job.log')
    text = explain.piped(sys.stdin.buffer) if chosen.text in (None, "-") else chosen.text
    return explain.explain(text, chosen.release, verbose=chosen.verbose, as_json=chosen.json)


def _prove(chosen: Namespace) -> int:
    from ds_patches.desk import prove

    if chosen.name is None and not chosen.all:
        return prove.listed()
    # It ends what it has begun, as after an interruption.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if chosen.all:
        return prove.prove_all(chosen.device)
    return prove.prove(chosen.name, chosen.svg, script=chosen.script, device=chosen.device)


def _run(chosen: Namespace) -> None:
    from ds_patches.startup import command

    flags.read(registry.patches())  # one that means nothing: a program would run on unpatched
    for hint in flags.misspelt(os.environ):
        print(f"ds_patches: {hint}", file=sys.stderr)
    words = chosen.words[1:] if chosen.words[:1] == ["--"] else chosen.words
    command.run(words, os.environ)


def _enable(_: Namespace) -> None:
    from ds_patches.startup import site_packages

    print(f"ds_patches: enabled by {site_packages.enable()}")
    print("ds_patches: nothing changes until a job sets DS_PATCHES=all")


def _disable(_: Namespace) -> None:
    from ds_patches.startup import site_packages

    file = site_packages.disable()
    print(f"ds_patches: removed {file}" if file else "ds_patches: it was not enabled")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="ds-patches",
        description=(ds_patches.__doc__ or "").partition("\n")[0],
        epilog=_EXAMPLES.format(page=page()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(act=lambda _: parser.print_help())
    parser.add_argument("--version", action="version", version=f"%(prog)s {ds_patches.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    as_json, of_release = ArgumentParser(add_help=False), ArgumentParser(add_help=False)
    as_json.add_argument("-v", "--verbose", action="store_true", help="say all there is to say")
    as_json.add_argument("--json", action="store_true", help="print JSON")
    of_release.add_argument(
        "--release", type=Version, metavar="X.Y.Z", help="default: as in the log, or installed"
    )

    def add(
        name: str, act: Callable[[Namespace], object], what: str, *parents: ArgumentParser
    ) -> ArgumentParser:
        command = commands.add_parser(name, help=what, parents=parents)
        command.set_defaults(act=act)
        return command

    explain = add("explain", _explain, "say what an error is, and what helps", of_release, as_json)
    explain.add_argument("text", nargs="?", metavar="TEXT", help="an error, a file or a question")
    doctor = add("doctor", _doctor, "say what this DeepSpeed gets wrong", of_release, as_json)
    doctor.add_argument(
        "--config", type=Path, metavar="FILE", help="DeepSpeed's JSON, or a framework's YAML"
    )
    prove = add("prove", _prove, "train a defect on two ranks: stock, patched, plain PyTorch")
    prove.epilog = (
        "exit status: 0, patched is right, stock or not; 1, patched is wrong; 2, not known"
    )
    what = prove.add_mutually_exclusive_group()
    what.add_argument("name", nargs="?", metavar="NAME", help="of a proof; else list them")
    what.add_argument("--all", action="store_true", help="all that this release gets wrong")
    prove.add_argument("--device", choices=("cpu", "cuda"), help="default: as DeepSpeed chooses")
    prove.add_argument("--script", action="store_true", help="print the script, for an issue")
    prove.add_argument("--svg", type=Path, metavar="FILE", help="draw the losses, by matplotlib")
    run = add("run", _run, "run a command, and all that it starts, patched")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    status = add("status", _status, "list the patches: name, state, reason", as_json)
    status.add_argument("name", nargs="?", metavar="NAME", help="say all about one patch")
    add("enable", _enable, "let jobs of this environment be patched by DS_PATCHES=all")
    add("disable", _disable, "undo enable")
    return parser


if __name__ == "__main__":
    sys.exit(main())
