"""Applying by itself: when, by whose requests, and what a failure does to the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from ds_patches.core import shape
from ds_patches.core.patch import Place
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


def lazy(here: Environment) -> Environment:
    """Let its DeepSpeed import nothing of itself."""
    fake.write(here.site / "deepspeed/__init__.py", "answer = 42")
    return here


def with_a_second_module(here: Environment) -> Environment:
    """Let the sample wrap a function of another module too, which the engine imports."""
    lazy(here)
    fake.write(here.site / "deepspeed/runtime/zero.py", "def gather(x):\n    return x\n")
    engine = here.site / "deepspeed/runtime/engine.py"
    engine.write_text(f"import sys\nfrom deepspeed.runtime import zero\n{engine.read_text()}")
    with engine.open("a") as text:
        text.write("if getattr(sys, 'broken', False):\n    raise ValueError('not yet')\n")
    binding = here.package / "sample/binding.py"
    gather = 'Target("deepspeed.runtime.zero", "gather", HERE + ":mark")'
    target = f"targets=(\n        {gather},"
    binding.write_text(fake.edited(binding.read_text(), "targets=(", target))
    recorded = here.package / "sample/shapes.json"
    place = Place("deepspeed.runtime.zero", "gather")
    found = {shape.of_source(place, here.site / "deepspeed"): "0.16.0-0.19.8"}
    recorded.write_text(json.dumps(json.loads(recorded.read_text()) | {place.key: found}))
    return here


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


def test_a_module_that_is_imported_late_is_waited_for(own: Environment) -> None:
    code = """
import deepspeed
status = ds_patches.status()["sample"]
assert status.state is ds_patches.State.PENDING
assert status.reason == "would apply at the import of deepspeed.runtime.engine"
assert "deepspeed.runtime" not in sys.modules, "auto-apply imports nothing of its own accord"
assert not activations()
import deepspeed.runtime.engine as engine
assert state() == "applied"
assert engine.scale(1)[0] == "marked"
assert len(activations()) == 1
"""
    holds(lazy(own), code)


def test_a_half_imported_target_is_waited_for(own: Environment) -> None:
    code = """
import deepspeed
sys.broken = True
try:
    import deepspeed.runtime.engine
except ValueError:
    pass
assert state() == "pending", "zero was whole while the engine was half imported"
assert not activations()
sys.broken = False
import deepspeed.runtime.engine as engine
assert state() == "applied"
assert engine.scale(1)[0] == engine.zero.gather(1)[0] == "marked"
assert len(activations()) == 1
"""
    holds(with_a_second_module(own), code)


def test_the_first_of_its_modules_is_enough(own: Environment) -> None:
    code = """
import deepspeed.runtime.zero
assert state() == "applied"
import deepspeed.runtime.engine
assert len(activations()) == 1
"""
    holds(with_a_second_module(own), code)


def test_taken_back_before_it_was_applied(own: Environment) -> None:
    """And after DeepSpeed was imported: before that, tests/core has every ordering."""
    code = """
import deepspeed
assert state() == "pending"
assert ds_patches.unapply("sample").state is ds_patches.State.REVERTED
import deepspeed.runtime.engine as engine
assert state() == "reverted"
assert engine.scale(1)[0] == "scale"
assert not activations()
ds_patches.apply("sample")
assert engine.scale(1)[0] == "marked"
"""
    holds(lazy(own), code)


@pytest.mark.parametrize(
    "call",
    ['apply("sample", mode="hard")', 'apply_all(options={"sample": {"mode": "hard"}})'],
)
@pytest.mark.parametrize("make", [lambda own: own, lazy], ids=["eager", "lazy"])
def test_a_call_comes_before_the_environment(
    own: Environment, call: str, make: Callable[[Environment], Environment]
) -> None:
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
    holds(make(own), code, DS_PATCHES_SAMPLE_MODE="soft")


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
