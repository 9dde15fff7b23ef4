"""A release that is not out yet: 0.19.8 with what open pull requests describe, as small edits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from ds_patches.core import registry
from ds_patches.core.state import State
from tests.core import fake
from tests.releases import matrix
from tests.releases.run import python

NEXT = "0.19.9"
BUILT = "0.19.8+0123abc"  # from upstream's sources, before the release
#: By pull request, and by file: what stands there, and what it says in the place of that.
EDITS = {
    # Gathered parameters live until a backward that retains nothing.
    8135: {
        "runtime/engine.py": [
            ("def scale(self, loss):", "def scale(self, loss, retain_graph=False):"),
        ],
        "runtime/zero/partitioned_param_coordinator.py": [
            (
                "        params_to_release = (self.__params_to_release(submodule",
                "        if not forward and self.retain_graph_on_current_backward:\n"
                "            return\n"
                "        params_to_release = (self.__params_to_release(submodule",
            )
        ],
    },
    # The backward waits for the last reduction of the buffer that comes next, and not for all.
    8366: {
        "runtime/zero/stage_1_and_2.py": [
            (
                "                get_accelerator().current_stream().wait_stream(stream)\n"
                "        else:",
                "                get_accelerator().current_stream().wait_event(bucket.reduced)\n"
                "        else:",
            )
        ],
    },
}
#: Of each: the patches that have to be read again, and of what.
CHANGED = {
    8135: {
        "accumulation": "DeepSpeedEngine.scale",
        "coalesce": "PartitionedParameterCoordinator.release_sub_module",
        "zero3_retain": "PartitionedParameterCoordinator.release_sub_module",
    },
    8366: {
        "coalesce": "DeepSpeedZeroOptimizer.average_tensor",
        "stream_safety": "DeepSpeedZeroOptimizer.average_tensor",
    },
}


@pytest.fixture(params=EDITS)
def number(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def answers_of(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], dict[str, matrix.Answer]]:
    monkeypatch.setenv("DEEPSPEED_TEST_RELEASES", str(tmp_path))

    def ask(version: str) -> dict[str, matrix.Answer]:
        _make(tmp_path / version, version, number)
        return matrix.ask(version)

    return ask


def test_a_patch_says_what_it_does_not_know(number: int, answers_of: Any) -> None:
    """Nobody has tested this release, so nothing is applied; some of it is other code, too."""
    answers = answers_of(NEXT)
    assert not any(one.live for one in answers.values()), answers
    changed = {n: one.reason for n, one in answers.items() if one.state is State.SHAPE_CHANGED}
    assert {*changed} == {*CHANGED[number]}
    assert all(CHANGED[number][name] in reason for name, reason in changed.items()), changed
    others = {one.state for name, one in answers.items() if name not in changed}
    assert others == {State.UNKNOWN_VERSION}


def test_doctor_does_not_pass_a_release_that_nobody_has_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSPEED_TEST_RELEASES", str(tmp_path))
    _make(tmp_path / NEXT, NEXT)
    assert python(NEXT, "-m", "ds_patches", "doctor").returncode == 1


def test_what_is_known_is_applied(number: int, answers_of: Any) -> None:
    """And nothing that needs a patch which is not."""
    answers = answers_of(BUILT)
    needing = {n for n, one in registry.patches().items() if {*one.requires} & {*CHANGED[number]}}
    live = {name for name, one in answers.items() if one.live}
    assert live == {*answers} - {*CHANGED[number]} - needing


def _make(folder: Path, version: str, number: int = 0) -> None:
    """Put it there: the installed one's files, edited."""
    found = distribution("deepspeed")
    package = Path(str(found.locate_file("deepspeed")))
    shutil.copytree(package, folder / "deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = fake.edited(found.read_text("METADATA") or "", found.version, version)
    fake.write(folder / f"deepspeed-{version}.dist-info" / "METADATA", metadata)
    for name, edits in EDITS.get(number, {}).items():
        file = folder / "deepspeed" / name
        for old, new in edits:
            file.write_text(fake.edited(file.read_text("utf-8"), old, new), encoding="utf-8")
