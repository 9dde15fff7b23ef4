"""Applying by itself: when, by whose requests, and what a failure does to the program."""

from __future__ import annotations

from subprocess import CompletedProcess

import pytest

from tests.core import fake
from tests.startup.environment import Environment

START = """
import sys
import ds_patches

def state():
    return ds_patches.status()["sample"].state.value

def activations():
    around = sys.modules.get("ds_patches.sample.around")
    return [entry for entry in around.log if entry[0] == "activate"] if around else []
"""


def start(
    here: Environment, code: str, wanted: str = "sample", **variables: str
) -> CompletedProcess[str]:
    """Run a program under the hook."""
    return here.start("-c", START + code, path=(here.hook,), DS_PATCHES=wanted, **variables)


def holds(here: Environment, code: str, **variables: str) -> None:
    """Run a program under the hook whose assertions are the test's."""
    done = start(here, code + "\nprint('done')", **variables)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_it_waits_and_then_applies_once(environment: Environment) -> None:
    code = """
status = ds_patches.status()["sample"]
assert (status.state, status.live) == (ds_patches.State.PENDING, False)
assert status.reason == "would apply at the import of deepspeed"
import deepspeed
status = ds_patches.status()["sample"]
assert (status.state, status.live) == (ds_patches.State.APPLIED, True)
assert deepspeed.runtime.engine.scale(1)[0] == "marked"
import deepspeed.runtime.engine
assert activations() == [("activate", "0.19.8", {"mode": "hard"})]
"""
    holds(environment, code, DS_PATCHES_SAMPLE_MODE="hard")


def test_taken_back_before_it_was_applied(environment: Environment) -> None:
    code = """
assert state() == "pending"
assert ds_patches.unapply("sample").state is ds_patches.State.REVERTED
import deepspeed.runtime.engine as engine
assert state() == "reverted"
assert engine.scale(1)[0] == "scale"
assert not activations()
ds_patches.apply("sample")
assert engine.scale(1)[0] == "marked"
"""
    holds(environment, code)


@pytest.mark.parametrize(
    "call",
    ['apply("sample", mode="hard")', 'apply_all(options={"sample": {"mode": "hard"}})'],
)
def test_a_call_comes_before_the_environment(environment: Environment, call: str) -> None:
    code = f"""
assert state() == "pending"
ds_patches.{call}
assert "deepspeed" in sys.modules
assert state() == "applied"
ds_patches.apply_all()
import deepspeed.runtime.engine
assert activations() == [("activate", "0.19.8", {{"mode": "hard"}})]
ds_patches.unapply("sample")
assert deepspeed.runtime.engine.scale(1)[0] == "scale"
"""
    holds(environment, code, DS_PATCHES_SAMPLE_MODE="soft")


@pytest.mark.parametrize("choice", ['skip="sample"', "only=[]"])
def test_a_call_that_leaves_it_out_has_the_last_word(environment: Environment, choice: str) -> None:
    code = f"""
assert state() == "pending"
ds_patches.apply_all({choice})
import deepspeed
assert not ds_patches.is_applied("sample")
assert deepspeed.runtime.engine.scale(1)[0] == "scale"
ds_patches.apply_all()
assert deepspeed.runtime.engine.scale(1)[0] == "marked"
"""
    holds(environment, code)


def test_arming_again_changes_nothing(own: Environment) -> None:
    fake.deepspeed(own.site / "newer", "0.19.9")
    code = """
from ds_patches import startup
sys.path.insert(0, sys.argv[1])
startup.arm()
import deepspeed
startup.arm()
assert state() == "unknown version"
print("done")
"""
    done = own.start("-c", START + code, own.site / "newer", path=(own.hook,), DS_PATCHES="sample")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("where", ["a call here", "a call elsewhere", "an import elsewhere"])
def test_threads_do_not_wait_for_each_other(own: Environment, where: str) -> None:
    """Each case ends in a deadlock if an import waits for the call, or the call for the import."""
    engine = own.site / "deepspeed/runtime/engine.py"
    engine.write_text(engine.read_text() + "import sys, time\nsys.started.set(); time.sleep(0.2)\n")
    code = f"""
import faulthandler, importlib, threading
from ds_patches.core import api
faulthandler.dump_traceback_later(20, exit=True)
sys.started = threading.Event()
hold = threading.Event()

def call():
    with api._call():
        sys.started.set()
        hold.wait(10)

def importer():
    importlib.import_module("deepspeed")

def apply():
    ds_patches.apply("sample", mode="hard")

here, there, between = {{
    "a call here": (importer, call, hold.set),
    "a call elsewhere": (importer, apply, lambda: None),
    "an import elsewhere": (apply, importer, lambda: None),
}}[{where!r}]
thread = threading.Thread(target=there)
thread.start()
assert sys.started.wait(10)
here()
between()
thread.join(10)
assert not thread.is_alive()
assert state() == "applied"
assert len(activations()) == 1
import deepspeed
assert deepspeed.runtime.engine.scale(1)[0] == "marked"
"""
    holds(own, code)
