"""What the start-up hook costs an interpreter, and what a call looks at; measured in earnest by
benchmarks/startup.py.
"""

from __future__ import annotations

import pytest

from tests.core import fake
from tests.startup.environment import Environment

#: Milliseconds: of a program that is not to be patched, and of one that has no use for DeepSpeed.
UNSET_BAR, SET_BAR = 2.0, 10.0
STARTS = 10


def imported(here: Environment, *path: object, **variables: str) -> dict[str, int]:
    """Return the modules that a bare start imports, with each one's own microseconds."""
    done = here.start("-X", "importtime", "-c", "pass", path=path, **variables)
    assert done.returncode == 0, done.stderr
    rows = [line.removeprefix("import time:").split("|") for line in done.stderr.splitlines()]
    return {name.strip(): int(own) for own, _, name in rows if own.strip().isdigit()}


@pytest.mark.parametrize("kind", ["PYTHONPATH", ".pth"])
@pytest.mark.parametrize("variables", [{}, {"DS_PATCHES": "all"}], ids=["unset", "set"])
def test_the_hook_is_light(
    environment: Environment, enabled: Environment, kind: str, variables: dict[str, str]
) -> None:
    """The best of many starts, so that only what is really imported can fail it."""
    here, path = (enabled, ()) if kind == ".pth" else (environment, (environment.hook,))
    bare = imported(environment).keys() - {"sitecustomize"}  # which is looked for in any case
    costs = []
    for _ in range(STARTS):
        found = imported(here, *path, **variables)
        ours = {name: own for name, own in found.items() if name not in bare}
        costs.append(sum(ours.values()) / 1000)
    assert ("ds_patches.startup" in ours) is bool(variables)
    assert min(costs) < (SET_BAR if variables else UNSET_BAR), ours


LOOKS = """
import sys
from collections import Counter
import deepspeed, ds_patches

looks = Counter()

def hear(event, arguments):
    if event in ("gc.get_objects", "gc.get_referrers"):
        looks["objects"] += 1
    elif event == "open" and "deepspeed-" in str(arguments[0]):
        looks[str(arguments[0]).rpartition("/")[2]] += 1

sys.addaudithook(hear)
for call in ("apply_all", "unapply_all", "apply_all", "status"):
    getattr(ds_patches, call)()
    assert (looks["objects"], looks["METADATA"]) == (call == "apply_all", 1), (call, looks)
    looks.clear()
"""


def test_a_call_looks_once_for_engines_and_for_the_release() -> None:
    """However many patches it is about: each look takes milliseconds."""
    done = fake.run(LOOKS)
    assert done.returncode == 0, done.stderr
