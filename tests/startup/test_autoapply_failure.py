"""What goes wrong when patches are applied by themselves, and what then becomes of the program."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core import fake
from tests.startup.environment import Environment
from tests.startup.test_autoapply import start

GOES_ON = """
import deepspeed
try:
    print(state())
except ds_patches.DsPatchesError as error:
    print(type(error).__name__)
assert deepspeed.runtime.engine.scale(1) == ("scale", 1)
"""


def released(here: Environment, version: str, engine: str = fake.ENGINE) -> None:
    """Install another DeepSpeed in the place of the one there."""
    (metadata,) = here.site.glob("deepspeed-*")
    metadata = metadata.rename(here.site / f"deepspeed-{version}.dist-info") / "METADATA"
    metadata.write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
    (here.site / "deepspeed/runtime/engine.py").write_text(engine)


def shape_changed(here: Environment) -> tuple[str, str]:
    """Break it; return the state that the patch is to have, and the reason."""
    released(here, "0.19.8", fake.edited(fake.ENGINE, "self.factor, x)", "x)"))
    return "shape changed", "deepspeed.runtime.engine:Engine.forward has the unknown shape"


def too_new(here: Environment) -> tuple[str, str]:
    released(here, "0.19.9")
    return "unknown version", "DS_PATCHES_FORCE=sample applies it"


def activation_raises(here: Environment) -> tuple[str, str]:
    around = here.package / "sample/around.py"
    raising = "raise RuntimeError('no licence')  # "
    around.write_text(fake.edited(around.read_text(), 'log.append(("activate", ', raising))
    return "failed", "RuntimeError: no licence"


def binding_raises(here: Environment) -> tuple[str, str]:
    (here.package / "sample/binding.py").write_text("raise RuntimeError('no licence')")
    return "broken", "ds_patches.sample.binding cannot be read: RuntimeError: no licence"


@pytest.mark.parametrize("broken", [shape_changed, too_new, activation_raises, binding_raises])
def test_a_patch_that_is_not_applied(
    own: Environment, broken: Callable[[Environment], tuple[str, str]]
) -> None:
    state, reason = broken(own)
    done = start(own, GOES_ON)
    assert (done.returncode, done.stdout) == (0, f"{state}\n"), done.stderr
    assert done.stderr.startswith(f"ds_patches: sample is not applied, {state}: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1, "one warning, and no page of text"
    strict = start(own, f"print('begun', flush=True){GOES_ON}", DS_PATCHES_STRICT="1")
    assert (strict.returncode, strict.stdout) == (1, "begun\n")
    last = strict.stderr.splitlines()[-1]
    assert last.startswith(f"ds_patches: sample is {state}: ")
    assert reason in last
    assert last.endswith("(DS_PATCHES_STRICT)")
    assert "Traceback" not in strict.stderr


NO_SUCH_PATCH = "no patch is named 'smaple' (did you mean 'sample'?); the patches are: sample"


@pytest.mark.parametrize(
    ("flags", "kind", "reason"),
    [
        ({"wanted": "smaple"}, "UnknownPatch", NO_SUCH_PATCH),
        ({"DS_PATCHES_SAMPEL": "1"}, "FlagError", "DS_PATCHES_SAMPEL means nothing"),
    ],
)
def test_a_flag_that_means_nothing(
    environment: Environment, flags: dict[str, str], kind: str, reason: str
) -> None:
    done = start(environment, GOES_ON, **flags)
    assert (done.returncode, done.stdout) == (0, f"{kind}\n"), done.stderr
    assert done.stderr.startswith("ds_patches: nothing is applied to deepspeed: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    strict = start(environment, GOES_ON, DS_PATCHES_STRICT="on", **flags)
    assert (strict.returncode, strict.stdout, strict.stderr.count("\n")) == (1, "", 1)
    assert reason in strict.stderr


def test_a_broken_patch_keeps_no_other_from_being_applied(own: Environment) -> None:
    own.add_patch("other")
    _, reason = binding_raises(own)
    code = "import deepspeed; print(deepspeed.runtime.engine.scale(1)[0])"
    done = start(own, code, "all")
    assert (done.returncode, done.stdout) == (0, "marked\n"), done.stderr
    (warning,) = (line for line in done.stderr.splitlines() if "sample" in line)
    assert warning.startswith(f"ds_patches: sample is not applied, broken: {reason}")
    silent = start(own, code, "all", DS_PATCHES_SAMPLE="0", DS_PATCHES_STRICT="1")
    assert (silent.returncode, silent.stdout) == (0, "marked\n")
    assert "sample" not in silent.stderr


@pytest.mark.parametrize("text", ["1 / 0", "x = = 1"])
def test_a_deepspeed_that_cannot_be_imported_is_the_programs_own_trouble(
    own: Environment, text: str
) -> None:
    """Nothing is applied before DeepSpeed is there, so there is nothing for us to say."""
    with (own.site / "deepspeed/runtime/engine.py").open("a") as source:
        source.write(f"\n{text}\n")
    code = """
try:
    import deepspeed
except (ZeroDivisionError, SyntaxError):
    print(ds_patches.apply_all()["sample"])
"""
    done = start(own, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sample is broken: the import of deepspeed")
    assert done.stderr.count("\n") == 1, "by the call that was made"


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
    import deepspeed
    print(deepspeed.runtime.engine.scale(1)[0])
"""
    done = start(own, code, "all")
    assert (done.returncode, done.stdout) == (0, "marked\n"), done.stderr


def test_what_is_fixed_upstream_or_not_wanted_is_no_failure(own: Environment) -> None:
    binding = own.package / "sample/binding.py"
    text = fake.edited(binding.read_text(), "fixed_in=None", 'fixed_in="0.19.8"')
    binding.write_text(text)
    for flags, state in (({}, "fixed upstream"), ({"DS_PATCHES_SAMPLE": "0"}, "disabled")):
        done = start(own, GOES_ON, DS_PATCHES_STRICT="1", **flags)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{state}\n", "")
