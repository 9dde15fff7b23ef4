"""The command line of tests.releases."""

from __future__ import annotations

import argparse
import sys

from tests import releases
from tests.releases.install import install
from tests.releases.run import run


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.releases", description=releases.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)

    installing = commands.add_parser("install", help="install DeepSpeed releases")
    installing.add_argument("version", nargs="+")

    running = commands.add_parser("run", help="run a subset of the suite once per release")
    running.add_argument("version", nargs="+")
    running.add_argument(
        "--select", default="core_case", metavar="EXPR", help="pytest -m (default: %(default)s)"
    )

    arguments = parser.parse_args()
    if arguments.command == "install":
        return install(arguments.version)
    return run(arguments.version, arguments.select)


if __name__ == "__main__":
    sys.exit(main())
