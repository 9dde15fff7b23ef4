"""The real patches on the installed DeepSpeed, without a line of theirs in the program."""

from __future__ import annotations

import json

import ds_patches
from ds_patches.startup import variables
from tests.core import fake

PROGRAM = """
import importlib.metadata
import importlib.util
import json
import sys

import ds_patches

def states():
    return {name: status.state.value for name, status in ds_patches.status().items()}

# How accelerate and transformers ask whether DeepSpeed is there, long before they import it.
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.metadata.metadata("deepspeed")
before = states()
assert "torch" not in sys.modules
import deepspeed
after = states()
ds_patches.apply_all()
print("states", json.dumps([before, after, states()]))
"""


def test_they_are_live_once_deepspeed_is_imported() -> None:
    hook = variables.HOOK
    done = fake.run(PROGRAM, hook, DS_PATCHES="all")
    assert done.returncode == 0, done.stderr
    (line,) = (one for one in done.stdout.splitlines() if one.startswith("states "))
    before, after, after_a_call = json.loads(line.removeprefix("states "))
    assert before.keys() == after.keys() == set(ds_patches.names())
    assert "applied" in after.values()
    assert after == after_a_call, "a call has nothing to add"
    assert all(before[name] == "pending" for name, state in after.items() if state == "applied")
