"""The start-up hooks: what else Python does at its start, it still does."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.core import fake
from tests.startup.environment import BEFORE_AND_AFTER, LIVE, NOT_LIVE, WANTED, Environment

#: An environment and a path on which it has a hook.
Hooked = tuple[Environment, tuple[Path, ...]]
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
    own = sitecustomize(tmp_path / "mine", text) if text else tmp_path / "mine"
    path = (own, sitecustomize(tmp_path / "hidden", "raise SystemExit('not mine')"))
    path = path if text else path[:1]
    start = {"path": (environment.hook, *path), **WANTED}
    bare = environment.start("-c", ACCOUNT, path=path)
    hooked = environment.start("-c", ACCOUNT, **start)
    assert hooked.stderr == bare.stderr
    assert json.loads(hooked.stdout) == json.loads(bare.stdout)
    ran = json.loads(bare.stdout)["ran"]
    assert ran == ([["sitecustomize", str(own / "sitecustomize.py")]] if text else None)
    assert environment.start("-c", BEFORE_AND_AFTER, **start).stdout == LIVE


def test_the_path_is_as_it_was_given(environment: Environment, tmp_path: Path) -> None:
    path = (tmp_path / "a", environment.hook, tmp_path / "b")
    code = "import sys; print(*sys.path[1:4], sep='\\n')"
    printed = environment.start("-c", code, path=path, **WANTED).stdout
    assert printed.splitlines() == [str(folder) for folder in path]


def imported(place: Environment, **more: Any) -> set[str]:
    rows = place.start("-X", "importtime", "-c", "pass", **more).stderr.splitlines()
    return {row.rpartition("|")[2].strip() for row in rows} - {"sitecustomize"}


@pytest.mark.parametrize("flags", [{"DS_PATCHES": "all"}, {"DS_PATCHES": ""}, {}])
def test_a_start_loads_nothing_but_the_wait(
    environment: Environment, hooked: Hooked, flags: dict[str, str]
) -> None:
    """Not even the package: that is loaded when DeepSpeed is."""
    place, path = hooked
    ours = imported(place, path=path, **flags) - imported(environment)
    if path:
        assert ours == {"__future__"}
    else:
        assert ours == ({"__future__", "_ds_patches_hook"} if any(flags.values()) else set())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"DS_PATCHES": "all"}, LIVE),
        ({"DS_PATCHES": "none"}, "disabled, disabled\n"),
        ({"DS_PATCHES": " "}, NOT_LIVE),
        ({}, NOT_LIVE),
    ],
)
def test_what_is_wanted_is_live(hooked: Hooked, flags: dict[str, str], expected: str) -> None:
    place, path = hooked
    assert place.start("-c", BEFORE_AND_AFTER, path=path, **flags).stdout == expected
    printed = place.doctor(path=path, **flags)
    is_armed = "this interpreter: armed" in printed
    assert is_armed is bool(flags.get("DS_PATCHES", "").strip()), printed
    assert "hook: none" not in printed


def test_hooks_that_are_there_twice_act_once(installed: Environment, tmp_path: Path) -> None:
    """In site-packages, on the path, and there again, also by another name."""
    (tmp_path / "ds_patches").symlink_to(installed.package)
    hooks = (installed.hook, installed.hook, tmp_path / "ds_patches/startup/hook")
    path = (*hooks, sitecustomize(tmp_path / "mine"))
    done = installed.start("-c", BEFORE_AND_AFTER, path=path, **WANTED)
    assert done.stdout == LIVE
    assert done.stderr.count("\n") == 1, "the sample's note, once"
    assert json.loads(installed.start("-c", ACCOUNT, path=path).stdout)["answer"] == 42
    assert "this interpreter" not in installed.doctor(), "nothing is wanted"


@pytest.mark.parametrize("option", ["-I", "-E", "-S", "-s"])
def test_options_of_python(environment: Environment, installed: Environment, option: str) -> None:
    """All but the last leave a hook on the path out, and -S one in site-packages."""
    site = (environment.site,) if option == "-S" else ()  # which has the modules of the program
    start = {"path": (environment.hook, *site), **WANTED}
    printed = environment.start(option, "-c", BEFORE_AND_AFTER, **start).stdout
    assert printed == (LIVE if option == "-s" else NOT_LIVE)
    reason = {"-S": "started with -S", "-s": "armed"}.get(option, "hook: none")
    assert reason in environment.doctor(option, **start)
    printed = installed.start(option, "-c", BEFORE_AND_AFTER, path=site, **WANTED).stdout
    assert printed == (NOT_LIVE if option == "-S" else LIVE)


def test_a_sitecustomize_before_the_hook_hides_it_and_doctor_names_it(
    environment: Environment, installed: Environment, tmp_path: Path
) -> None:
    """Not one in site-packages. DeepSpeed's launchers put the working directory first."""
    first = sitecustomize(tmp_path)
    start = {"path": (first, environment.hook), "cwd": first, **WANTED}
    assert environment.start("-c", BEFORE_AND_AFTER, **start).stdout == NOT_LIVE
    printed = environment.doctor(**start)
    assert f"on PYTHONPATH: {environment.hook}" in printed
    assert f"not armed, {first / 'sitecustomize.py'} comes first" in printed
    assert installed.start("-c", BEFORE_AND_AFTER, **start).stdout == LIVE


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


def test_children_stay_patched(hooked: Hooked, tmp_path: Path) -> None:
    script = fake.write(tmp_path / "parent.py", CHILDREN)
    place, path = hooked
    printed = place.start(script, BEFORE_AND_AFTER, path=path, **WANTED).stdout
    assert printed == f"spawn applied\nfork applied\nforkserver applied\n{LIVE}\n"
