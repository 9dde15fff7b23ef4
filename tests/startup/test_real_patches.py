"""The real patches on the installed DeepSpeed, without a line of theirs in the program."""

from __future__ import annotations

from ds_patches.startup import variables
from tests.core import fake

PROGRAM = """
import importlib.metadata, importlib.util, sys
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
assert before.keys() == after.keys() == set(ds_patches.names())
assert "applied" in after.values()
assert all(before[name] == "pending" for name, state in after.items() if state == "applied")
ds_patches.apply_all()
assert states() == after, "a call has nothing to add"
"""


def test_they_are_live_once_deepspeed_is_imported() -> None:
    done = fake.run(PROGRAM, variables.HOOK, DS_PATCHES="all")
    assert done.returncode == 0, done.stderr
