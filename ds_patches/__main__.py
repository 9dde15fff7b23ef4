"""The command line: `python -m ds_patches status | doctor | table`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ds_patches.core import api, report
from ds_patches.core.errors import DsPatchesError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 if `doctor` found drift, 2 for a flag that means nothing."""
    chosen = _parser().parse_args(arguments)
    try:
        if chosen.command == "table":
            print(report.table())
        elif chosen.command == "doctor":
            text, drifted = report.doctor()
            print(text)
            return int(drifted)
        elif chosen.json:
            print(json.dumps({n: s.as_json() for n, s in api.status().items()}, indent=2))
        else:
            print(report.status(api.status().values(), colour=sys.stdout.isatty()))
    except DsPatchesError as error:
        print(f"ds_patches: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ds_patches", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="one line per patch: state, release, why, links")
    status.add_argument("--json", action="store_true", help="the same as JSON")
    commands.add_parser("doctor", help="environment, what would apply and why not, drift")
    commands.add_parser("table", help="the patches as a markdown table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
