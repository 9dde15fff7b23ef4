"""DeepSpeed releases beside each other, and the core cases of the suite on each of them.

    python -m tools.releases install 0.16.3 0.18.2     # into .releases/<version>/
    python -m tools.releases run 0.16.3 0.18.2         # the core cases, once per release
    python -m tools.releases run --turn-of 6           # on those of six parts whose turn it is
    python -m tools.releases run --whole 0.18.2        # every test of the patches
    python -m tools.releases record                    # all releases, into docs/compatibility.md
    python -m tools.releases measure                   # `prove` on old and new, docs/measured.json
    python -m tools.releases gpus                      # all proofs on GPUs, docs/compatibility.md
    python -m tools.releases models                    # of transformers, docs/models.md
    python -m tools.releases upstream CHECKOUT         # DeepSpeed's unit tests, stock and patched
    python -m tools.releases news CHECKOUT             # fixes that no known release has
    python -m tools.releases shapes                    # into ds_patches/core/shapes.json

One interpreter and one torch serve all: a release is chosen by being first on PYTHONPATH. What is
missing is installed, and two releases run at a time. DEEPSPEED_TEST_RELEASES names another folder
than .releases.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from math import inf
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
Result = TypeVar("Result")

#: Every release that is tested, the oldest first.
RELEASES = tuple(
    f"0.{minor}.{patch}"
    for minor, last in {16: 9, 17: 6, 18: 9, 19: 8}.items()
    for patch in range(last + 1)
)
#: Each release has two ranks, and waits for compilers and for imports more than it computes.
AT_ONCE = min(os.cpu_count() or 1, 2)


def place(version: str) -> Path:
    """Where a release of DeepSpeed lies."""
    return Path(os.environ.get("DEEPSPEED_TEST_RELEASES", ROOT / ".releases")).resolve() / version


def this_turn(of: int) -> int:
    """The turn that it is, of several: by the commits so far, or by the day.

    A clone without its history has too few commits to count.
    """
    if git("rev-parse", "--is-shallow-repository") == "false":
        return int(git("rev-list", "--count", "HEAD") or 0) % of
    return date.today().toordinal() % of


def git(*arguments: str) -> str:
    """Return git's answer about the checkout; "" without git, repository or answer."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def each(
    work: Callable[[str], Result], names: Sequence[str], within: float = inf
) -> Iterator[tuple[str, Result | None]]:
    """Every name with what `work` made of it, in order.

    within: seconds from now; what was not begun by then is not done, and has None for a result.
    """
    until = time.monotonic() + within

    def unless_late(name: str) -> tuple[str, Result | None]:
        return name, work(name) if time.monotonic() < until else None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(unless_late, names)


def say(text: str) -> None:
    """Print in one piece: what is done at the same time prints as well."""
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def install(versions: Iterable[str]) -> int:
    """Install what is missing of these; 1 when one could not be installed."""
    done = dict(each(install_one, tuple(dict.fromkeys(versions))))
    return int(not all(done.values()))


def install_one(version: str) -> bool:
    """Install this one if it is missing, and say so; whether it is there then."""
    requirement, whole = f"deepspeed=={version}", place(version)
    if whole.is_dir():
        say(f"{requirement}: already there")
        return True
    # Renamed only when pip is done: a folder of that name is a whole install.
    whole.parent.mkdir(parents=True, exist_ok=True)
    part = whole.with_name(f".part-{whole.name}")
    shutil.rmtree(part, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--target", str(part), requirement],
        env=os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        say(f"{requirement}: failed\n{done.stdout}")
        return False
    part.rename(whole)
    say(f"{requirement}: installed")
    return True
