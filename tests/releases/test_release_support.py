"""`make release-support`: what it raises, what it leaves, and what it does with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ds_patches.core import registry
from ds_patches.core.state import State
from tests.releases import record, support
from tests.releases.matrix import Answer

NEWEST = record.load().releases[-1]
BINDING = 'fixed_in=None,\nsupported=">=0.16.0,<=0.19.8",\nreleases="<=0.19.7",\n'


class Steps:
    """Stands for the processes that are started; notes them. One that begins so fails."""

    def __init__(self, failing: str = "nothing") -> None:
        self.done: list[str] = []
        self.failing = failing

    def __call__(self, *arguments: str) -> int:
        self.done.append(" ".join(arguments))
        return int(self.done[-1].startswith(self.failing))


def nothing(wanted: Sequence[str] = ()) -> int:
    return 0


@pytest.fixture
def binding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for every patch's binding."""
    file = tmp_path / "binding.py"
    file.write_text(BINDING, encoding="utf-8")
    monkeypatch.setattr(support, "binding_of", lambda patch: file)
    return file


def answers(state: State) -> dict[str, Answer]:
    """What the gate says of one patch; the others are fixed upstream."""
    ready = dict.fromkeys(registry.patches(), Answer(State.FIXED_UPSTREAM, "", live=False))
    return ready | {"coalesce": Answer(state, "", live=False)}


def supported(state: State, steps: Steps) -> int:
    return support.support(NEWEST, nothing, nothing, lambda version: answers(state), steps)


def test_only_the_range_of_the_patch_is_raised() -> None:
    assert support.raised(BINDING, "0.19.9") == BINDING.replace("0.19.8", "0.19.9")
    for patch in registry.patches().values():
        assert support.raised(support.binding_of(patch).read_text(), "9.9").count("<=9.9") == 1
    with pytest.raises(ValueError, match="supported"):
        support.raised("nothing", "0.19.9")


@pytest.mark.parametrize("state", [State.UNKNOWN_VERSION, State.READY])
def test_a_release_whose_shapes_are_known_is_recorded(binding: Path, state: State) -> None:
    """Ready is what it is where the same call was stopped before."""
    binding.write_text(BINDING.replace("0.19.8", "0.19.6"), encoding="utf-8")
    steps = Steps()
    assert supported(state, steps) == 0
    assert f'supported=">=0.16.0,<={NEWEST}"' in binding.read_text(encoding="utf-8")
    shapes, one, every = steps.done
    assert shapes.startswith("-m ds_patches record-shapes coalesce --releases ")
    assert one == f"-m tests.releases record {NEWEST}"
    assert every == "-m tests.releases record"


def test_a_release_with_other_code_is_left_to_a_person(
    binding: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert supported(State.SHAPE_CHANGED, Steps()) == 1
    assert binding.read_text(encoding="utf-8") == BINDING
    assert "refused, because its code there is not what was tested: coalesce" in (
        capsys.readouterr().out
    )


def test_a_range_whose_shapes_cannot_be_recorded_is_taken_back(binding: Path) -> None:
    assert supported(State.UNKNOWN_VERSION, Steps(failing="-m ds_patches")) == 1
    assert binding.read_text(encoding="utf-8") == BINDING


def test_a_failure_there_ends_it(binding: Path) -> None:
    steps = Steps(failing=f"-m tests.releases record {NEWEST}")
    assert supported(State.FIXED_UPSTREAM, steps) == 1
    assert steps.done == [f"-m tests.releases record {NEWEST}"]


def test_a_release_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no release 99\.0"):
        support.support("99.0", nothing, nothing)
