"""Command-line options that the benchmarks share, and the file that keeps a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.workload import Workload


def positive(text: str) -> int:
    """1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def parsed(parser: argparse.ArgumentParser, kind: type[Workload]) -> argparse.Namespace:
    """An option for each default of the workload; one that is a list takes several values."""
    for name, value in kind.full.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=str if name in kind.named_by_words else positive,
            nargs="+" if isinstance(value, list) else None,
            help=f"{_words(value)} on CUDA, {_words(kind.smoke[name])} on CPU",
        )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="CUDA where there is any")
    parser.add_argument("--json", type=Path, metavar="PATH", help="keep everything there")
    parser.add_argument("--commit", help="of the measured code, where there is no git")
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)  # between own processes
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (kind.smoke if options.device == "cpu" else kind.full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    kind.check(parser, options)
    return options


def kept(options: argparse.Namespace) -> dict[str, Any]:
    """The options that shape a run."""
    left_out = ("json", "commit", "reference")
    return {name: value for name, value in vars(options).items() if name not in left_out}


def words(options: Mapping[str, Any]) -> list[str]:
    """These, as a command line has them."""
    found = []
    for name, value in options.items():
        if value is not None:
            found += [f"--{name.replace('_', '-')}", *_words(value).split()]
    return found


def write(path: Path | None, document: Mapping[str, Any]) -> None:
    """Keep `document` as JSON, if there is a place for it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
