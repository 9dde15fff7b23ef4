"""A release that is not out yet: the installed one with what a pull request describes."""

from __future__ import annotations

import shutil
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from ds_patches.core import registry
from ds_patches.core.state import State
from tests.core import fake
from tests.releases.record import states_of
from tests.releases.run import python

#: The release, and a build of it from upstream's sources, before.
NEXT, BUILT = "0.19.9", "0.19.8+0123abc"
#: Pull request 8135, gathered parameters live until a backward that retains nothing: by file, what
#: stands there, and what it says in the place of that.
EDITS = {
    "runtime/engine.py": ("scale(self, loss):", "scale(self, loss, retain_graph=False):"),
    "runtime/zero/partitioned_param_coordinator.py": (
        "        params_to_release = (self.__params_to_release(submodule",
        "        if not forward and self.retain_graph_on_current_backward:\n"
        "            return\n"
        "        params_to_release = (self.__params_to_release(submodule",
    ),
}
#: The patches that have to be read again, and of what.
CHANGED = {
    "accumulation": "DeepSpeedEngine.scale",
    "coalesce": "PartitionedParameterCoordinator.release_sub_module",
    "half_without_zero": "DeepSpeedEngine.scale",
    "zero3_retain": "PartitionedParameterCoordinator.release_sub_module",
}
#: Patches of what upstream has cured before.
OVER = {n for n, p in registry.patches().items() if not p.supported.endswith(version("deepspeed"))}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPSPEED_TEST_RELEASES", str(tmp_path))
    return tmp_path


def make(folder: Path, version: str) -> None:
    """Put it there: the installed one's files, edited."""
    found = distribution("deepspeed")
    package = Path(str(found.locate_file("deepspeed")))
    shutil.copytree(package, folder / "deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = fake.edited(found.read_text("METADATA") or "", found.version, version)
    fake.write(folder / f"deepspeed-{version}.dist-info" / "METADATA", metadata)
    for name, edit in EDITS.items():
        file = folder / "deepspeed" / name
        file.write_text(fake.edited(file.read_text("utf-8"), *edit), encoding="utf-8")


def test_a_patch_says_what_it_does_not_know(folder: Path) -> None:
    """Nobody has tested this release, so nothing is applied; some of it is other code, too."""
    make(folder / NEXT, NEXT)
    found = states_of(NEXT)
    changed = {n: why for n, (state, why) in found.items() if state == State.SHAPE_CHANGED.value}
    assert {*changed} == {*CHANGED}
    assert all(CHANGED[name] in reason for name, reason in changed.items()), changed
    others = {state for name, (state, _) in found.items() if name not in {*CHANGED, *OVER}}
    assert others == {State.UNKNOWN_VERSION.value}
    assert python(NEXT, "-m", "ds_patches", "doctor").returncode == 1


def test_what_is_known_is_applied(folder: Path) -> None:
    """And nothing that needs a patch which is not."""
    make(folder / BUILT, BUILT)
    needing = {n for n, one in registry.patches().items() if {*one.requires} & {*CHANGED}}
    live = {name for name, (state, _) in states_of(BUILT).items() if state == "live"}
    assert live == {*registry.patches()} - {*CHANGED} - needing - OVER
