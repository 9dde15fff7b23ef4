"""The command line of tests.releases."""

from __future__ import annotations

import argparse
import signal
import sys

from packaging.version import Version

from tests import releases
from tests.releases import at_once, index, matrix, page, pairs, record, support, turn
from tests.releases.install import install
from tests.releases.run import run


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    # Whoever ends this, by whichever signal, finds no half made environment of 5 GB.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _do(arguments)
    except ValueError as wrong:
        parser.error(str(wrong))
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on here", file=sys.stderr)
        return 130


def _do(given: argparse.Namespace) -> int:
    if given.command == "install":
        return install(given.version)
    if given.command == "run":
        return run(_versions(given), given.whole, given.within)
    if given.command == "record":
        if given.pair is None:
            return matrix.run(given.version, given.again)
        if given.version:
            raise ValueError("record takes releases or --pair, not both")
        return pairs.run([pairs.parse(text) for text in given.pair], given.again)
    if given.command == "index":
        return index.look()
    if given.command == "support":
        return support.support(given.release)
    page.rewrite(record.load())
    return 0


def _versions(given: argparse.Namespace) -> list[str]:
    """Those that were named, and those of the turn."""
    if given.turn_of is None:
        if not given.version:
            raise ValueError("no release was named, and no --turn-of")
        return given.version
    now = turn.this(given.turn_of)
    mine = turn.releases(now)
    at_once.say(f"{now}: {' '.join(mine)}")
    return list(dict.fromkeys([*given.version, *mine]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.releases", description=releases.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    installing = commands.add_parser("install", help="install releases, or name==version")
    installing.add_argument("version", nargs="+", help="of DeepSpeed")

    running = commands.add_parser("run", help="run core tests once per release")
    running.add_argument("version", nargs="*", help="of DeepSpeed")
    running.add_argument("--turn-of", type=int, metavar="N", help="also every Nth known release")
    running.add_argument("--whole", action="store_true", help="all tests of the patches instead")
    running.add_argument("--within", type=float, metavar="SECONDS", help="begin none after that")

    recording = commands.add_parser("record", help="test what docs/compatibility.json lacks")
    recording.add_argument(
        "version", nargs="*", type=lambda text: str(Version(text)), help="default: every known one"
    )
    recording.add_argument("--again", action="store_true", help="also what is recorded already")
    recording.add_argument(
        "--pair", nargs="*", metavar="RELEASE+TORCH", help="default: every outstanding one"
    )

    supporting = commands.add_parser("support", help="prepare support for a new release, hours")
    supporting.add_argument("release", type=lambda text: str(Version(text)))
    commands.add_parser("index", help="ask the package index for new releases")
    commands.add_parser("page", help="write docs/compatibility.md again, from the records")
    return parser


if __name__ == "__main__":
    sys.exit(main())
