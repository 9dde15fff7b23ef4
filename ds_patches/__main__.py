"""The command line: `ds-patches COMMAND`, which is `python -m ds_patches COMMAND`."""

import argparse
import json
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from packaging.version import Version

import ds_patches
from ds_patches.core import api, flags, registry
from ds_patches.core.errors import DsPatchesError, FlagError, nearest
from ds_patches.core.state import Statuses

_EXAMPLES = """\
examples:
  ds-patches doctor ds_config.json
  ds-patches doctor job.log
  ds-patches doctor "mat2 must be a matrix" --release 0.18.4
  ds-patches prove outputs
  ds-patches run -- torchrun train.py

exit status: 0, no known defect; 1, a defect; 2, no diagnosis, or an invalid flag
all errors and their cures: {page}
"""

_STATUS = "0, done; 2, an invalid flag"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 2 for an invalid flag."""
    # Python ignores this signal. Without this line, output to a closed pipe ends in a traceback,
    # and the command that `run` starts ignores the signal too.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    parser = _parser()
    try:
        _must_begin_with_a_command(words, parser.get_default("commands"))
    except FlagError as error:
        parser.error(str(error))
    chosen = parser.parse_args(words)
    try:
        return int(chosen.act(chosen) or 0)
    except DsPatchesError as error:
        if getattr(chosen, "json", False):
            print(json.dumps({"status": 2, "error": str(error)}, indent=2))
        print(f"ds_patches: {error}", file=sys.stderr)
        return 2


def _must_begin_with_a_command(words: Sequence[str], commands: Iterable[str]) -> None:
    """Raise FlagError for an unknown command."""
    if words and not words[0].startswith("-") and words[0] not in commands:
        hint = " (it is now doctor)" if words[0] == "explain" else nearest(words[0], commands)
        raise FlagError(f"there is no command {words[0]!r}{hint}")


def _status(chosen: Namespace) -> None:
    from ds_patches.diagnostics import status

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
    from ds_patches.diagnostics import doctor, training

    report = doctor.diagnose(training.read(chosen.files, chosen.config), chosen.release)
    text = json.dumps(report.as_json(), indent=2) if chosen.json else None
    print(text or "\n".join(report.lines(verbose=chosen.verbose)))
    return report.status


def _prove(chosen: Namespace) -> int:
    from ds_patches.diagnostics import prove

    if chosen.name is None and not chosen.all:
        return prove.print_proofs(as_json=chosen.json)
    # Ends the processes of running proofs, as an interruption does.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if chosen.all:
        return prove.prove_all(chosen.device, as_json=chosen.json)
    if chosen.script:
        print(prove.composed(chosen.name)[1], end="")
        return prove.RIGHT
    return prove.prove(chosen.name, chosen.svg, device=chosen.device, as_json=chosen.json)


def _run(chosen: Namespace) -> None:
    from ds_patches.startup import command

    flags.read(
        registry.patches()
    )  # raises for an invalid flag, with which a program would run unpatched
    for hint in flags.misspelt(os.environ):
        print(f"ds_patches: {hint}", file=sys.stderr)
    words = chosen.words[1:] if chosen.words[:1] == ["--"] else chosen.words
    command.run(words, os.environ)


def _page() -> Path:
    """Return the page of all errors: in a wheel docs/ is in the package, else beside it."""
    package = Path(__file__).parent
    places = [folder / "docs/troubleshooting.md" for folder in (package, package.parent)]
    return next((place for place in places if place.exists()), places[0])


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="ds-patches",
        description=(ds_patches.__doc__ or "").partition("\n")[0],
        epilog=_EXAMPLES.format(page=_page()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(act=lambda _: parser.print_help())
    parser.add_argument("--version", action="version", version=f"%(prog)s {ds_patches.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    parser.set_defaults(commands=commands.choices)
    as_json, whole, of_release = (ArgumentParser(add_help=False) for _ in range(3))
    as_json.add_argument("--json", action="store_true", help="print JSON")
    whole.add_argument("-v", "--verbose", action="store_true", help="print all details")
    of_release.add_argument(
        "--release", type=Version, metavar="X.Y.Z", help="default: the log's, or the installed one"
    )

    def add(
        name: str,
        act: Callable[[Namespace], object],
        what: str,
        *more: ArgumentParser,
        end: str = _STATUS,
    ) -> ArgumentParser:
        command = commands.add_parser(
            name,
            help=what,
            description=f"{what[:1].upper()}{what[1:]}.",
            epilog=f"exit status: {end}",
            parents=more,
        )
        command.set_defaults(act=act)
        return command

    doctor = add(
        "doctor",
        _doctor,
        "diagnose a configuration, a log, or this environment",
        of_release,
        whole,
        as_json,
        end="0, no known defect, or all are fixed; 1, a defect; 2, no diagnosis",
    )
    doctor.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="DeepSpeed's JSON, a framework's YAML, a log (- is stdin), or a quoted line of a log",
    )
    doctor.add_argument("--config", type=Path, help=argparse.SUPPRESS)  # its older form
    prove = add(
        "prove",
        _prove,
        "reproduce a defect on two ranks: plain PyTorch, stock and patched DeepSpeed",
        as_json,
        end="0, patched is right; 1, it is wrong, or --all does not show a defect; 2, no result",
    )
    what = prove.add_mutually_exclusive_group()
    what.add_argument("name", nargs="?", metavar="NAME", help="a proof; by default, list all")
    what.add_argument("--all", action="store_true", help="run all proofs for this release")
    prove.add_argument("--device", choices=("cpu", "cuda"), help="default: as DeepSpeed chooses")
    prove.add_argument("--script", action="store_true", help="print the reproducer, for an issue")
    prove.add_argument("--svg", type=Path, metavar="FILE", help="plot the losses, with matplotlib")
    run = add(
        "run",
        _run,
        "run a command with patches, also in the processes that it starts",
        end="the command's; 2, an invalid flag, or a command that cannot be run",
    )
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    status = add("status", _status, "list the patches: name, state, reason", whole, as_json)
    status.add_argument("name", nargs="?", metavar="NAME", help="print all details of one patch")
    return parser


if __name__ == "__main__":
    sys.exit(main())
