"""The hook on PYTHONPATH: what else Python does at its start, it still does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core import fake
from tests.startup.environment import BEFORE_AND_AFTER, LIVE, NOT_LIVE, Environment

#: What the user's own sitecustomize may be; each is also run without our hook, and compared.
OF_USERS = {
    "none": "",
    "plain": "answer = 42",
    "raises": "raise RuntimeError('no licence')",
    "lacks a module": "import no_such_module",
    "raises a bare ImportError": "raise ImportError('of nothing')",
    "imports DeepSpeed": "import deepspeed",
    "changes the path": "sys.path.insert(0, '/first'); sys.path.append('/last')",
}
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


def sitecustomize(folder: Path, text: str) -> Path:
    return fake.write(folder / "sitecustomize.py", RAN + text).parent


@pytest.mark.parametrize("text", OF_USERS.values(), ids=OF_USERS)
def test_the_users_sitecustomize_is_run_as_without_the_hook(
    environment: Environment, tmp_path: Path, text: str
) -> None:
    mine = sitecustomize(tmp_path / "mine", text) if text else tmp_path / "mine"
    path = (mine, sitecustomize(tmp_path / "hidden", "raise SystemExit('not mine')"))
    path = path if text else path[:1]
    bare = environment.start("-c", ACCOUNT, path=path)
    hooked = environment.start("-c", ACCOUNT, path=(environment.hook, *path), DS_PATCHES="sample")
    notes = [line for line in hooked.stderr.splitlines(keepends=True) if "built before" in line]
    assert hooked.stderr.replace("".join(notes), "") == bare.stderr
    assert hooked.returncode == bare.returncode == 0
    assert json.loads(hooked.stdout) == json.loads(bare.stdout)
    ran = json.loads(bare.stdout)["ran"]
    assert ran == ([["sitecustomize", str(mine / "sitecustomize.py")]] if text else None)

    live = environment.start(
        "-c", BEFORE_AND_AFTER, path=(environment.hook, *path), DS_PATCHES="sample"
    )
    assert live.stdout in (LIVE, "applied, applied\n"), live.stderr


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_path_is_as_it_was_given(environment: Environment, tmp_path: Path, place: int) -> None:
    path = [tmp_path / "a", tmp_path / "b"]
    path.insert(place, environment.hook)
    code = "import sys; print(*sys.path[1:4], sep='\\n')"
    done = environment.start("-c", code, path=tuple(path), DS_PATCHES="sample")
    assert done.stdout.splitlines() == [str(folder) for folder in path]


WAIT = {"ds_patches", "ds_patches.startup", "ds_patches.core", "ds_patches.core.imports"}


@pytest.mark.parametrize(
    ("flags", "ours"),
    [({"DS_PATCHES": "all"}, {*WAIT, "__future__"}), ({}, set()), ({"DS_PATCHES": ""}, set())],
)
def test_a_start_loads_nothing_but_the_wait(
    hooked: Callable[..., str], environment: Environment, flags: dict[str, str], ours: set[str]
) -> None:
    """No torch, DeepSpeed, wrapt, packaging; no typing, unless Python's own site loads it."""
    code = "import sys; print(*sys.modules)"
    bare = environment.start("-c", code).stdout.split()
    loaded = set(hooked("-c", code, **flags).split()) - set(bare)
    assert loaded - {"sitecustomize"} == ours


@pytest.mark.parametrize(
    ("value", "expected"),
    [("sample", LIVE), ("all", LIVE), ("none", "disabled, disabled\n"), (None, NOT_LIVE)],
)
def test_what_is_wanted_is_live(
    hooked: Callable[..., str], value: str | None, expected: str
) -> None:
    assert hooked("-c", BEFORE_AND_AFTER, **({"DS_PATCHES": value} if value else {})) == expected


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
    printed = hooked(script, BEFORE_AND_AFTER, DS_PATCHES="sample")
    expected = "spawn applied\nfork applied\nforkserver applied\n"
    assert printed == f"{expected}{LIVE}\n"


def test_hooks_that_are_there_twice_act_once(enabled: Environment, tmp_path: Path) -> None:
    """In site-packages, on the path, and there again, also by another name."""
    (tmp_path / "ds_patches").symlink_to(enabled.package)
    hooks = (enabled.hook, enabled.hook, tmp_path / "ds_patches/startup/hook")
    path = (*hooks, sitecustomize(tmp_path / "mine", "answer = 42"))
    done = enabled.start("-c", BEFORE_AND_AFTER, path=path, DS_PATCHES="sample")
    assert done.stdout == LIVE
    assert done.stderr.count("\n") == 1, "the sample's note, once"
    assert json.loads(enabled.start("-c", ACCOUNT, path=path).stdout)["answer"] == 42


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_an_option_that_leaves_the_hook_out(environment: Environment, option: str) -> None:
    site = (environment.site,) if option == "-S" else ()  # which has the modules of the program
    start = {"path": (environment.hook, *site), "DS_PATCHES": "sample"}
    done = environment.start(option, "-c", BEFORE_AND_AFTER, **start)
    assert (done.returncode, done.stdout, done.stderr) == (0, NOT_LIVE, "")
    doctor = environment.start(option, "-m", "ds_patches", "doctor", **start).stdout
    reason = "started with -S" if option == "-S" else "hook: none"
    assert reason in doctor.partition("\nstart-up\n")[2]


def test_a_program_of_another_environment_is_let_alone(
    environment: Environment, tmp_path: Path
) -> None:
    path = (environment.hook, sitecustomize(tmp_path, "answer = 42"))
    foreign = {"DS_PATCHES": "sample", "DS_PATCHES_PREFIX": str(tmp_path), "path": path}
    done = environment.start("-c", BEFORE_AND_AFTER, DS_PATCHES_STRICT="1", **foreign)
    assert (done.returncode, done.stdout, done.stderr) == (0, NOT_LIVE, "")
    assert json.loads(environment.start("-c", ACCOUNT, **foreign).stdout)["answer"] == 42
    doctor = environment.ds_patches("doctor", **foreign).stdout
    assert f"not armed, DS_PATCHES_PREFIX={tmp_path} is another environment" in doctor


def test_a_sitecustomize_before_the_hook_hides_it_and_doctor_names_it(
    environment: Environment, tmp_path: Path
) -> None:
    """DeepSpeed's launchers put the working directory first on the path of their hosts."""
    first = sitecustomize(tmp_path, "")
    start = {"path": (first, environment.hook), "cwd": first, "DS_PATCHES": "sample"}
    assert environment.start("-c", BEFORE_AND_AFTER, **start).stdout == NOT_LIVE
    section = environment.start("-m", "ds_patches", "doctor", **start).stdout
    _, _, section = section.partition("\nstart-up\n")
    assert f"on PYTHONPATH: {environment.hook}" in section
    assert f"not armed, {first / 'sitecustomize.py'} comes first on the path" in section


def test_doctor_says_that_the_hook_works(hooked: Callable[..., str]) -> None:
    _, _, section = hooked("-m", "ds_patches", "doctor", DS_PATCHES="sample").partition("start-up")
    assert "hook: " in section
    assert "hook: none" not in section
    assert "this interpreter: armed" in section
    _, _, unset = hooked("-m", "ds_patches", "doctor").partition("start-up")
    assert "not set, so nothing is applied by itself" in unset


def test_the_hooks_folder_holds_the_hook_alone() -> None:
    """It is on the path of every program: whatever lies there could be imported by its name."""
    folder = fake.REPOSITORY / "ds_patches/startup/hook"
    assert [one for one in os.listdir(folder) if one != "__pycache__"] == ["sitecustomize.py"]
