"""The start-up hooks: what else Python does at its start, it still does."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.core import fake
from tests.startup.environment import BEFORE_AND_AFTER, LIVE, NOT_LIVE, Done, Environment

WANTED = {"DS_PATCHES": "sample"}
#: Who ran, by which name, and what is left of it.
ACCOUNT = """
import json, sys
from pathlib import Path
module = sys.modules.get("sitecustomize")
place = getattr(module, "__file__", None)
print(json.dumps({
    "ran": getattr(sys, "ran", None),
    "file": None if place is None or "hook" in Path(place).parts else place,
    "answer": getattr(module, "answer", None),
    "path": [one for one in sys.path if not one.endswith("hook")],
}))
"""
RAN = "import sys; sys.ran = [*getattr(sys, 'ran', []), (__name__, __file__)]; "


def sitecustomize(folder: Path, text: str = "answer = 42") -> Path:
    return fake.write(folder / "sitecustomize.py", RAN + text).parent


@pytest.mark.parametrize(
    "text",
    [
        "",  # there is none
        "answer = 42",
        "raise RuntimeError('no licence')",
        "sys.path.insert(0, '/first'); sys.path.append('/last')",
    ],
)
def test_the_users_sitecustomize_is_run_as_without_the_hook(
    environment: Environment, tmp_path: Path, text: str
) -> None:
    mine = sitecustomize(tmp_path / "mine", text) if text else tmp_path / "mine"
    path = (mine, sitecustomize(tmp_path / "hidden", "raise SystemExit('not mine')"))
    path = path if text else path[:1]
    start = {"path": (environment.hook, *path), **WANTED}
    bare = environment.start("-c", ACCOUNT, path=path)
    hooked = environment.start("-c", ACCOUNT, **start)
    assert hooked.stderr == bare.stderr
    assert hooked.returncode == bare.returncode == 0
    assert json.loads(hooked.stdout) == json.loads(bare.stdout)
    ran = json.loads(bare.stdout)["ran"]
    assert ran == ([["sitecustomize", str(mine / "sitecustomize.py")]] if text else None)
    assert environment.prints("-c", BEFORE_AND_AFTER, **start) == LIVE


def test_the_path_is_as_it_was_given(environment: Environment, tmp_path: Path) -> None:
    path = (tmp_path / "a", environment.hook, tmp_path / "b")
    code = "import sys; print(*sys.path[1:4], sep='\\n')"
    printed = environment.prints("-c", code, path=path, **WANTED)
    assert printed.splitlines() == [str(folder) for folder in path]


WAIT = {"ds_patches", "ds_patches.startup", "ds_patches.core", "ds_patches.core.imports"}


def imported(start: Callable[..., Done], **more: Any) -> set[str]:
    rows = start("-X", "importtime", "-c", "pass", **more).stderr.splitlines()
    return {row.rpartition("|")[2].strip() for row in rows} - {"sitecustomize"}


@pytest.mark.parametrize("kind", ["PYTHONPATH", ".pth"])
@pytest.mark.parametrize("wanted", ["all", "", None])
def test_a_start_loads_nothing_but_the_wait(
    environment: Environment, enabled: Environment, kind: str, wanted: str | None
) -> None:
    """No torch, DeepSpeed, wrapt, packaging; no typing, unless Python's own site loads it."""
    hooked = partial(environment.start, path=(environment.hook,))
    hooked = enabled.start if kind == ".pth" else hooked
    flags = {} if wanted is None else {"DS_PATCHES": wanted}
    ours = imported(hooked, **flags) - imported(environment.start)
    assert ours == ({*WAIT, "__future__"} if wanted else set())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"DS_PATCHES": "all"}, LIVE),
        ({"DS_PATCHES": "none"}, "disabled, disabled\n"),
        ({}, NOT_LIVE),
    ],
)
def test_what_is_wanted_is_live(
    hooked: Callable[..., str], flags: dict[str, str], expected: str
) -> None:
    assert hooked("-c", BEFORE_AND_AFTER, **flags) == expected
    said = hooked("-m", "ds_patches", "doctor", **flags).partition("\nstart-up\n")[2]
    assert ("this interpreter: armed" in said) is bool(flags), said
    assert "hook: none" not in said


CHILDREN = """
import multiprocessing, subprocess, sys

def child(queue):
    import deepspeed, ds_patches
    queue.put(ds_patches.status()["sample"].state.value)

if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(method, queue.get(timeout=20))
        process.join()
    print(subprocess.check_output([sys.executable, "-c", sys.argv[1]], text=True))
"""


def test_children_stay_patched(hooked: Callable[..., str], tmp_path: Path) -> None:
    script = fake.write(tmp_path / "parent.py", CHILDREN)
    printed = hooked(script, BEFORE_AND_AFTER, **WANTED)
    assert printed == f"spawn applied\nfork applied\nforkserver applied\n{LIVE}\n"


def test_hooks_that_are_there_twice_act_once(enabled: Environment, tmp_path: Path) -> None:
    """In site-packages, on the path, and there again, also by another name."""
    (tmp_path / "ds_patches").symlink_to(enabled.package)
    hooks = (enabled.hook, enabled.hook, tmp_path / "ds_patches/startup/hook")
    path = (*hooks, sitecustomize(tmp_path / "mine"))
    done = enabled.start("-c", BEFORE_AND_AFTER, path=path, **WANTED)
    assert done.stdout == LIVE
    assert done.stderr.count("\n") == 1, "the sample's note, once"
    assert json.loads(enabled.prints("-c", ACCOUNT, path=path))["answer"] == 42


@pytest.mark.parametrize("option", ["-I", "-E", "-S", "-s"])
def test_options_of_python(environment: Environment, enabled: Environment, option: str) -> None:
    """All but the last leave a hook on the path out, and -S one in site-packages."""
    site = (environment.site,) if option == "-S" else ()  # which has the modules of the program
    start = {"path": (environment.hook, *site), **WANTED}
    done = environment.start(option, "-c", BEFORE_AND_AFTER, **start)
    assert (done.returncode, done.stdout) == (0, LIVE if option == "-s" else NOT_LIVE)
    reason = {"-S": "started with -S", "-s": "armed"}.get(option, "hook: none")
    assert reason in environment.doctor(option, **start)
    printed = enabled.prints(option, "-c", BEFORE_AND_AFTER, path=site, **WANTED)
    assert printed == (NOT_LIVE if option == "-S" else LIVE)


def test_a_program_of_another_environment_is_let_alone(
    environment: Environment, tmp_path: Path
) -> None:
    path = (environment.hook, sitecustomize(tmp_path))
    foreign = {**WANTED, "DS_PATCHES_PREFIX": str(tmp_path), "path": path}
    done = environment.start("-c", BEFORE_AND_AFTER, DS_PATCHES_STRICT="1", **foreign)
    assert (done.returncode, done.stdout, done.stderr) == (0, NOT_LIVE, "")
    assert json.loads(environment.prints("-c", ACCOUNT, **foreign))["answer"] == 42
    assert f"not armed, DS_PATCHES_PREFIX={tmp_path}" in environment.doctor(**foreign)


def test_a_sitecustomize_before_the_hook_hides_it_and_doctor_names_it(
    environment: Environment, tmp_path: Path
) -> None:
    """DeepSpeed's launchers put the working directory first on the path of their hosts."""
    first = sitecustomize(tmp_path)
    start = {"path": (first, environment.hook), "cwd": first, **WANTED}
    assert environment.prints("-c", BEFORE_AND_AFTER, **start) == NOT_LIVE
    said = environment.doctor(**start)
    assert f"on PYTHONPATH: {environment.hook}" in said
    assert f"not armed, {first / 'sitecustomize.py'} comes first" in said
