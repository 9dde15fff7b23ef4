"""Command-line options that the benchmarks share, and the file that keeps a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def positive(text: str) -> int:
    """1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def common(
    parser: argparse.ArgumentParser, full: Mapping[str, Any], smoke: Mapping[str, Any]
) -> None:
    """Add an option for each default of `full` (CUDA) and `smoke` (CPU), and those of any run.

    A default that is a list is an option that takes several values.
    """
    for name, value in full.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=positive,
            nargs="+" if isinstance(value, list) else None,
            help=f"{_words(value)} on CUDA, {_words(smoke[name])} on CPU",
        )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="CUDA where there is any")
    of_any_run(parser)


def of_any_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="PATH", help="keep everything there")
    parser.add_argument("--commit", help="of the measured code, where there is no git")


def filled(
    options: argparse.Namespace, full: Mapping[str, Any], smoke: Mapping[str, Any]
) -> argparse.Namespace:
    """The device, and the defaults for it, where none was given."""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (smoke if options.device == "cpu" else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def kept(options: argparse.Namespace) -> dict[str, Any]:
    """The options that shape a run."""
    return {name: value for name, value in vars(options).items() if name not in ("json", "commit")}


def write(path: Path | None, document: Mapping[str, Any]) -> None:
    """Keep `document` as JSON, if there is a place for it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
