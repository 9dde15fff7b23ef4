"""The command line of tests.releases."""

from __future__ import annotations

import argparse
import sys

from packaging.version import Version

from tests import releases
from tests.releases import index, matrix, page, record
from tests.releases.install import install
from tests.releases.run import run


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.command == "install":
        return install(arguments.version)
    if arguments.command == "run":
        return run(arguments.version, arguments.select)
    if arguments.command == "record":
        try:
            return matrix.run(arguments.version, arguments.again)
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on here", file=sys.stderr)
            return 130
    if arguments.command == "index":
        return index.look()
    page.rewrite(record.load())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.releases", description=releases.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)

    installing = commands.add_parser("install", help="install releases")
    installing.add_argument("version", nargs="+", help="of DeepSpeed, or name==version")

    running = commands.add_parser("run", help="run a subset of the suite once per release")
    running.add_argument("version", nargs="+")
    running.add_argument(
        "--select", default="core_case", metavar="EXPR", help="pytest -m (default: %(default)s)"
    )

    recording = commands.add_parser("record", help="test what docs/compatibility.json lacks")
    recording.add_argument(
        "version", nargs="*", type=lambda text: str(Version(text)), help="default: every known one"
    )
    recording.add_argument("--again", action="store_true", help="also what is recorded already")

    commands.add_parser("index", help="ask the package index for new releases")
    commands.add_parser("page", help="write docs/compatibility.md again, from the records")
    return parser


if __name__ == "__main__":
    sys.exit(main())
