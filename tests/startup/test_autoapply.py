"""Applying by itself, beside calls and threads; what goes wrong, and what becomes of the program.

`tests/core/test_lifecycle.py` has every ordering of the hook, imports and calls.
"""

from collections.abc import Callable

import pytest

from tests.core import fake
from tests.startup.environment import Done, Environment

START = """
import sys
import ds_patches

def state():
    return ds_patches.status()["sample"].state.value

def is_marked():
    import deepspeed.runtime.engine
    return deepspeed.runtime.engine.scale(1)[0] == "marked"
"""


def start(here: Environment, code: str, wanted: str = "sample", **more: str) -> Done:
    return here.start("-c", START + code, path=(here.hook,), DS_PATCHES=wanted, **more)


def test_a_call_that_leaves_it_out_has_the_last_word(environment: Environment) -> None:
    code = """
assert state() == "pending"
ds_patches.apply_all(skip="sample")
import deepspeed
assert not ds_patches.is_applied("sample")
assert not is_marked()
ds_patches.apply_all()
assert is_marked()
"""
    done = start(environment, code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("here", "there", "between"),
    [
        ("importer", "call", "hold.set"),
        ("importer", "apply", "bool"),
        ("apply", "importer", "bool"),
    ],
)
def test_threads_do_not_wait_for_each_other(
    own: Environment, here: str, there: str, between: str
) -> None:
    """Each case ends in a deadlock if an import waits for the call, or the call for the import."""
    engine = own.site / "deepspeed/runtime/engine.py"
    engine.write_text(engine.read_text() + "import sys, time\nsys.started.set(); time.sleep(0.2)\n")
    code = f"""
import faulthandler, importlib, threading
from ds_patches.core import api
faulthandler.dump_traceback_later(20, exit=True)
sys.started, hold = threading.Event(), threading.Event()

def call():
    with api._call():
        sys.started.set()
        hold.wait(10)

def importer():
    importlib.import_module("deepspeed")

def apply():
    ds_patches.apply("sample")

thread = threading.Thread(target={there})
thread.start()
assert sys.started.wait(10)
{here}()
{between}()
thread.join(10)
assert not thread.is_alive()
assert state() == "applied" and is_marked()
from ds_patches.sample import around
assert around.log == ["activate"]
"""
    done = start(own, code)
    assert done.returncode == 0, done.stderr


COSTS = """
import sys
import deepspeed, ds_patches

def count(frame, event, argument):
    global calls
    calls += event == "call"

for call, most in (("apply_all", 80_000), ("unapply_all", 20_000), ("apply_all", 20_000)):
    calls = 0
    sys.setprofile(count)
    getattr(ds_patches, call)()
    sys.setprofile(None)
    assert calls < most, (call, calls)
"""


def test_a_call_takes_a_tenth_of_a_second() -> None:
    """However many patches it is about: it looks for engines and for the release once."""
    fake.output(COSTS)


# --- What goes wrong ------------------------------------------------------------------------------

GOES_ON = """
import deepspeed
try:
    print(state())
except ds_patches.DsPatchesError as error:
    print(type(error).__name__)
assert deepspeed.runtime.engine.scale(1) == ("scale", 1)
"""


def too_new(here: Environment) -> tuple[str, str]:
    """Break it; return the state that the patch is to have, and the reason."""
    (metadata,) = here.site.glob("deepspeed-*")
    metadata = metadata.rename(here.site / "deepspeed-0.19.9.dist-info") / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.9\n")
    return "unknown version", "DS_PATCHES_FORCE=sample applies it"


def activation_raises(here: Environment) -> tuple[str, str]:
    around = here.package / "sample/around.py"
    raising = "raise RuntimeError('no licence')  # "
    around.write_text(fake.edited(around.read_text(), 'log.append("activate")', raising))
    return "failed", "RuntimeError: no licence"


@pytest.mark.parametrize("broken", [too_new, activation_raises])
def test_a_patch_that_is_not_applied(
    own: Environment, broken: Callable[[Environment], tuple[str, str]]
) -> None:
    """One warning; in strict mode it ends the program."""
    state, reason = broken(own)
    done = start(own, GOES_ON)
    assert (done.returncode, done.stdout) == (0, f"{state}\n"), done.stderr
    assert done.stderr.count("\n") == done.stderr.count(f"sample is not applied, {state}: ") == 1
    assert reason in done.stderr
    strict = start(own, f"print('begun', flush=True){GOES_ON}", DS_PATCHES_STRICT="1")
    assert (strict.returncode, strict.stdout) == (1, "begun\n")
    assert f"sample is {state}: " in strict.stderr.splitlines()[-1]
    assert reason in strict.stderr.splitlines()[-1]
    assert "Traceback" not in strict.stderr


def test_a_flag_that_means_nothing(environment: Environment) -> None:
    done = start(environment, GOES_ON, wanted="smaple")
    assert (done.returncode, done.stdout) == (0, "UnknownPatch\n"), done.stderr
    assert done.stderr.count("\n") == done.stderr.count("no patch is named 'smaple'") == 1
    strict = start(environment, GOES_ON, wanted="smaple", DS_PATCHES_STRICT="on")
    assert (strict.returncode, strict.stdout, strict.stderr.count("\n")) == (1, "", 1)
    assert "no patch is named 'smaple'" in strict.stderr


def test_a_strict_refusal_that_the_program_swallows_comes_again(own: Environment) -> None:
    """Many a library asks for DeepSpeed in a bare `try: import deepspeed; except: ...`.

    In a thread it is no end of the program, and is said.
    """
    too_new(own)
    code = """
import threading
thread = threading.Thread(target=__import__, args=("deepspeed",))
thread.start()
thread.join()
sys.stderr.write("after the thread\\n")
for _ in range(2):
    try:
        import deepspeed
    except BaseException as refusal:
        print(type(refusal).__name__)
    print("deepspeed" in sys.modules)
import deepspeed
print("unpatched")
"""
    done = start(own, code, DS_PATCHES_STRICT="1")
    assert (done.returncode, done.stdout) == (1, "SystemExit\nFalse\n" * 2)
    in_the_thread, _, _ = done.stderr.partition("after the thread")
    assert "ds_patches: sample is unknown version: " in in_the_thread


def test_a_call_that_is_refused_holds_nothing_up(own: Environment) -> None:
    """It was the call that imported DeepSpeed; the other patches are due after it."""
    activation_raises(own)
    own.add_patch("other")
    code = """
try:
    ds_patches.apply("sample")
except ds_patches.PatchNotApplied:
    assert is_marked()
"""
    done = start(own, code, "all")
    assert done.returncode == 0, done.stderr
