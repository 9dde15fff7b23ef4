"""The command line of tests.releases."""

from __future__ import annotations

import argparse
import signal
import sys

from packaging.version import Version

from tests import releases
from tests.releases import matrix, page, pairs, record, support, turn
from tests.releases.install import install
from tests.releases.run import run


def main() -> int:
    parser = _parser()
    given = parser.parse_args()
    # Whoever ends this, by whichever signal, finds no half made environment of 5 GB.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return int(given.work(given) or 0)
    except ValueError as wrong:
        parser.error(str(wrong))
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on here", file=sys.stderr)
        return 130


def _run(given: argparse.Namespace) -> int:
    """Those that were named, and those of the turn."""
    wanted = given.version
    if given.turn_of is not None:
        now = turn.this(given.turn_of)
        mine = turn.releases(now)
        releases.say(f"{now}: {' '.join(mine)}")
        wanted = list(dict.fromkeys([*wanted, *mine]))
    elif not wanted:
        raise ValueError("no release was named, and no --turn-of")
    return run(wanted, given.whole, given.within)


def _record(given: argparse.Namespace) -> int:
    if given.pair is None:
        return matrix.run(given.version, given.again)
    if given.version:
        raise ValueError("record takes releases or --pair, not both")
    return pairs.run([pairs.parse(text) for text in given.pair], given.again)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.releases", description=releases.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True)
    installing = commands.add_parser("install", help="install releases, or name==version")
    installing.set_defaults(work=lambda given: install(given.version))
    installing.add_argument("version", nargs="+", help="of DeepSpeed")

    running = commands.add_parser("run", help="run core tests once per release")
    running.set_defaults(work=_run)
    running.add_argument("version", nargs="*", help="of DeepSpeed")
    running.add_argument("--turn-of", type=int, metavar="N", help="also every Nth known release")
    running.add_argument("--whole", action="store_true", help="all tests of the patches instead")
    running.add_argument("--within", type=float, metavar="SECONDS", help="begin none after that")

    recording = commands.add_parser("record", help="test what docs/compatibility.json lacks")
    recording.set_defaults(work=_record)
    recording.add_argument("version", nargs="*", type=_release, help="default: every known one")
    recording.add_argument("--again", action="store_true", help="also what is recorded already")
    recording.add_argument(
        "--pair", nargs="*", metavar="RELEASE+TORCH", help="default: every outstanding one"
    )

    supporting = commands.add_parser("support", help="prepare support for a new release, hours")
    supporting.set_defaults(work=lambda given: support.support(given.release))
    supporting.add_argument("release", type=_release)
    asking = commands.add_parser("index", help="ask the package index for new releases")
    asking.set_defaults(work=lambda given: support.look())
    paging = commands.add_parser("page", help="write docs/compatibility.md again, from the records")
    paging.set_defaults(work=lambda given: page.rewrite(record.load()))
    return parser


def _release(text: str) -> str:
    return str(Version(text))


if __name__ == "__main__":
    sys.exit(main())
