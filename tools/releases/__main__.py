"""The command line of tools.releases."""

import argparse
import sys
from importlib.metadata import version
from math import inf
from pathlib import Path

from tools import releases
from tools.releases import install, shapes
from tools.releases.measure import ON_GPUS, measure, measure_on_gpus
from tools.releases.news import news
from tools.releases.record import columns, record
from tools.releases.run import run
from tools.releases.upstream import upstream


def main() -> int:
    parser = argparse.ArgumentParser("python -m tools.releases", description=releases.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True)

    installing = commands.add_parser("install", help="install releases")
    installing.add_argument("version", nargs="+", help="of DeepSpeed")
    installing.set_defaults(work=lambda options: install(options.version))

    running = commands.add_parser("run", help="run the core cases once per release")
    running.add_argument("version", nargs="*", help="of DeepSpeed")
    running.add_argument("--turn-of", type=int, metavar="N", help="also every Nth known release")
    running.add_argument("--whole", action="store_true", help="all tests of the patches instead")
    running.add_argument("--within", type=float, default=inf, help="seconds; begin none after that")
    running.set_defaults(work=_run)

    recording = commands.add_parser("record", help="run them, and write docs/compatibility.md")
    recording.add_argument("version", nargs="*", default=releases.RELEASES, help="default: all")
    recording.add_argument("--only", nargs="+", choices=columns(), help="of the columns")
    recording.set_defaults(work=lambda options: record(options.version, options.only))

    measuring = commands.add_parser("measure", help="run `prove`, and write docs/measured.json")
    measuring.add_argument("name", nargs="*", help="of a proof; default: all")
    measuring.set_defaults(work=lambda options: measure(options.name))
    on_gpus = commands.add_parser("gpus", help="run all proofs, and write docs/compatibility.md")
    on_gpus.add_argument("version", nargs="*", default=ON_GPUS, help="of DeepSpeed")
    on_gpus.set_defaults(work=lambda options: measure_on_gpus(options.version))

    training = commands.add_parser("models", help="models of transformers, into docs/models.md")
    training.add_argument("version", nargs="*", default=ON_GPUS, help="of DeepSpeed")
    training.set_defaults(work=_models)

    judging = commands.add_parser("upstream", help="DeepSpeed's unit tests, stock and patched")
    judging.add_argument("checkout", type=Path, help="of DeepSpeed's repository")
    judging.add_argument("--only", nargs="+", default=(), metavar="PATH", help="of its tests")
    judging.add_argument("--version", default=version("deepspeed"), help="of DeepSpeed")
    judging.add_argument("--sample", type=int, default=0, metavar="N", help="so many of them")
    judging.add_argument("--salt", default="", help="of the sample: another one is another")
    judging.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    judging.set_defaults(
        work=lambda a: upstream(a.checkout, a.version, a.sample, a.salt, a.only, a.device)
    )

    telling = commands.add_parser("news", help="fixes that no known release has")
    telling.add_argument("checkout", type=Path, help="of DeepSpeed's repository; it may be bare")
    telling.set_defaults(work=lambda options: news(options.checkout))

    shaping = commands.add_parser("shapes", help="write what the code looks like in each release")
    shaping.set_defaults(work=lambda options: shapes.record(shapes.installed()))

    options = parser.parse_args()
    return int(options.work(options))


def _run(options: argparse.Namespace) -> int:
    """Run the named releases, and every Nth of the others, the newest first: some of every era."""
    wanted = options.version
    if options.turn_of is not None:
        older = [name for name in reversed(releases.RELEASES) if name != version("deepspeed")]
        wanted += older[releases.this_turn(options.turn_of) :: options.turn_of]
    return run(list(dict.fromkeys(wanted)), options.whole, options.within)


def _models(options: argparse.Namespace) -> int:
    from tools.releases.models import models  # imports torch, for which nobody else waits

    return models(options.version)


if __name__ == "__main__":
    sys.exit(main())
