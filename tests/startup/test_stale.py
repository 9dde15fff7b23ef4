"""A hook that is of no use to its interpreter says so where DeepSpeed is imported, once."""

import shutil
from collections.abc import Callable

import pytest

from tests.startup.environment import STRICT, WANTED, Environment

IMPORTS = "import deepspeed; import deepspeed; print('trained')"


def of_another_copy(place: Environment) -> str:
    """Make a hook on the path of this kind; return what is to be said of it."""
    shutil.copytree(place.package, place.root / "other/ds_patches")
    return f"it is of {place.root / 'other/ds_patches'}, and this Python imports {place.package}"


def of_another_environment(place: Environment) -> str:
    shutil.move(place.package, place.root / "other/ds_patches")
    return "No module named 'ds_patches'"


def of_a_broken_package(place: Environment) -> str:
    (place.root / "other").mkdir()
    (place.root / "other/ds_patches").symlink_to(place.package)
    (place.package / "startup/__init__.py").write_text("def (")
    return "invalid syntax"


@pytest.mark.parametrize(
    ("is_installed", "stale"),
    [
        (False, of_another_copy),
        (False, of_another_environment),
        (False, of_a_broken_package),
        (True, of_a_broken_package),
    ],
)
def test_one_line_where_deepspeed_is_imported(
    own: Environment, is_installed: bool, stale: Callable[[Environment], str]
) -> None:
    """Also in a daemon: its stderr is closed."""
    hook = own.root / "other/ds_patches/startup/hook"
    path = () if is_installed else (hook,)
    if is_installed:
        own.install()
    reason = stale(own)
    looks = "import importlib.util; importlib.util.find_spec('deepspeed')"
    for code, flags in ((looks, STRICT), (IMPORTS, {})):
        assert not own.start("-c", code, path=path, **flags).stderr
    closed = ("sh", "-c", '"$0" -c "$1" 2>&-', own.python, IMPORTS)
    for flags, status, printed in ((WANTED, 0, "trained\n"), (STRICT, 1, "")):
        done = own.start("-c", IMPORTS, path=path, status=status, **flags)
        assert (done.stdout, done.stderr.count("\n")) == (printed, 1), done.stderr
        assert str(own.site if is_installed else hook) in done.stderr
        assert reason in done.stderr
        assert own.execute(*closed, path=path, status=status, **flags).stdout == printed


def test_the_first_of_two_hooks_acts(own: Environment) -> None:
    """The environment's own copy is applied, though `run` of another copy has started it."""
    own.install()
    of_another_copy(own)
    code = "import deepspeed, ds_patches; print(ds_patches.status()['sample'].state.value)"
    path = (own.root / "other/ds_patches/startup/hook",)
    assert own.start("-c", code, path=path, **STRICT).stdout == "applied\n"
