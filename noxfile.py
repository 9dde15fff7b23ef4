"""One session for each DeepSpeed release that docs/compatibility.json knows.

    nox                                   # those not recorded yet; goes on where it stopped
    nox -s "release(0.17.3)"              # one of them
    nox -s "release(0.17.3)" -- --again   # though it is recorded
    nox -s "pair(0.16.9+2.6.0)"           # with another torch, in an environment of its own
    nox -s index                          # is there a new release?
    nox -s page                           # docs/compatibility.md from the records

Sessions have no environment of their own: releases lie beside each other and share one torch, but
for pairs, whose environments tests/releases makes and removes.
"""

import json
import sys
from pathlib import Path

import nox

HERE = Path(__file__).parent
RECORDED = HERE / "docs" / "compatibility.json"
RELEASES = json.loads(RECORDED.read_text(encoding="utf-8"))["index"]["releases"]
KNOWN = json.loads((HERE / "tests" / "releases" / "pairs.json").read_text(encoding="utf-8"))
PAIRS = [f"{one['release']}+{one['torch']}" for one in KNOWN]

nox.options.sessions = ["release"]
nox.options.default_venv_backend = "none"


@nox.session
@nox.parametrize("version", [nox.param(version, id=version) for version in RELEASES])
def release(session: nox.Session, version: str) -> None:
    """Test every patch on one release, and record it."""
    tests_releases(session, "record", version, *session.posargs)


@nox.session
@nox.parametrize("which", [nox.param(which, id=which) for which in PAIRS])
def pair(session: nox.Session, which: str) -> None:
    """Test every patch on a release with the torch that people have beside it, and record it."""
    tests_releases(session, "record", "--pair", which, *session.posargs)


@nox.session
def index(session: nox.Session) -> None:
    """Ask the package index for new releases."""
    tests_releases(session, "index")


@nox.session
def page(session: nox.Session) -> None:
    """Write docs/compatibility.md from the records."""
    tests_releases(session, "page")


def tests_releases(session: nox.Session, *arguments: str) -> None:
    session.run(sys.executable, "-m", "tests.releases", *arguments, external=True)
