"""Applying by itself, beside calls and threads; what goes wrong, and what becomes of the program.

`tests/core/test_lifecycle.py` has every ordering of the hook, imports and calls.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_patches.startup import command
from tests.core import fake


@pytest.fixture
def hooked(tmp_path: Path) -> fake.Place:
    """The sample patch, and a DeepSpeed, for programs that have the hook on their path."""
    place = fake.Place(tmp_path, "sample")
    place.path.insert(0, command.HOOK)
    return place


def start(place: fake.Place, code: str, **more: Any) -> Any:
    return place.run(code, **{"DS_PATCHES": "sample"} | more)


def test_a_call_that_leaves_it_out_has_the_last_word(hooked: fake.Place) -> None:
    code = """
        ds_patches.apply_all(skip="sample")
        import deepspeed
        assert not ds_patches.is_applied("sample")
        assert not fake.depth()
        ds_patches.apply_all()
        assert fake.depth()
    """
    start(hooked, code)


@pytest.mark.parametrize(
    ("first", "second"), [("importer", "apply"), ("apply", "importer"), ("apply", "apply")]
)
def test_threads_do_not_wait_for_each_other(hooked: fake.Place, first: str, second: str) -> None:
    """Each case ends in a deadlock if an import waits for the call, or the call for the import."""
    engine = fake.ENGINE + "import sys, time\nsys.started.set(); time.sleep(0.2)\n"
    fake.deepspeed(hooked.deepspeed, engine=engine)
    code = f"""
        import faulthandler, importlib, threading
        faulthandler.dump_traceback_later(20, exit=True)
        sys.started = threading.Event()

        def importer():
            importlib.import_module("deepspeed")

        def apply():
            ds_patches.apply("sample")

        thread = threading.Thread(target={second})
        thread.start()
        assert sys.started.wait(10)
        {first}()
        thread.join(10)
        assert not thread.is_alive()
        assert fake.states("sample") == ["applied"] and fake.depth()
        from ds_patches.sample import around
        assert around.log == ["activate"]
    """
    start(hooked, code)


COSTS = """
import sys
import deepspeed, ds_patches

def count(frame, event, argument):
    global calls
    calls += event == "call"

for call, most in (("apply_all", 45_000), ("unapply_all", 20_000), ("apply_all", 20_000)):
    calls = 0
    sys.setprofile(count)
    getattr(ds_patches, call)()
    sys.setprofile(None)
    assert calls < most, (call, calls)
"""


def test_calls_are_bounded() -> None:
    """Applying looks for engines and for the release once."""
    fake.run(COSTS)


# --- What goes wrong ------------------------------------------------------------------------------

#: Makes applying fail; returns the state that the patch is to have, and the reason.
Break = Callable[[fake.Place], tuple[str, str]]


def too_new(place: fake.Place) -> tuple[str, str]:
    fake.deepspeed(place.deepspeed, "0.19.9")
    return "refused", "DS_PATCHES_FORCE=sample applies it"


def activation_raises(place: fake.Place) -> tuple[str, str]:
    raising = "raise RuntimeError('no licence')"
    place.edit("sample/around.py", 'log.append("activate")', raising)
    return "failed", "RuntimeError: no licence"


def runs_unpatched(place: fake.Place, printed: str, lines: tuple[str, str], **flags: str) -> str:
    """Demand that a program runs on with one warning; in strict mode, that it ends with a line.

    Returns both.
    """
    code = """
        print("begun", flush=True)
        import deepspeed
        try:
            print(*fake.states("sample"))
        except ds_patches.DsPatchesError as error:
            print(type(error).__name__)
        assert deepspeed.runtime.engine.scale(1) == ("scale", 1)
    """
    done = start(place, code, **flags)
    assert done.stdout == f"begun\n{printed}\n"
    assert done.stderr.count("\n") == done.stderr.count(lines[0]) == 1
    strict = start(place, code, status=1, DS_PATCHES_STRICT="on", **flags)
    assert strict.stdout == "begun\n"
    assert lines[1] in strict.stderr.splitlines()[-1]
    assert "Traceback" not in strict.stderr
    return f"{done.stderr}{strict.stderr}"


@pytest.mark.parametrize("broken", [too_new, activation_raises])
def test_a_patch_that_is_not_applied(hooked: fake.Place, broken: Break) -> None:
    state, reason = broken(hooked)
    lines = f"sample is not applied, {state}: ", f"sample is {state}: "
    assert runs_unpatched(hooked, state, lines).count(reason) == 3, "strict, it is said again"


def test_a_flag_that_means_nothing(hooked: fake.Place) -> None:
    lines = ("no patch is named 'smaple'",) * 2
    stderr = runs_unpatched(hooked, "UnknownPatch", lines, DS_PATCHES="smaple")
    assert stderr.count("\n") == 2


@pytest.mark.parametrize("broken", [too_new, activation_raises])
def test_a_strict_refusal_that_the_program_swallows_comes_again(
    hooked: fake.Place, broken: Break
) -> None:
    """Many a library asks for DeepSpeed in a bare `try: import deepspeed; except: ...`.

    In a thread it is no end of the program, and is said.
    """
    state, _ = broken(hooked)
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
    done = start(hooked, code, status=1, DS_PATCHES_STRICT="1")
    assert done.stdout == "SystemExit\nFalse\n" * 2
    in_the_thread, _, _ = done.stderr.partition("after the thread")
    assert f"ds_patches: sample is {state}: " in in_the_thread
