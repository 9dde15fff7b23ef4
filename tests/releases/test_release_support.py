"""`make release-support`: what it raises, what it leaves, and what it does with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_patches.core import registry
from ds_patches.core.state import State
from tests.releases import record, support
from tests.releases.matrix import Answer

NEWEST = record.load().releases[-1]
BINDING = 'fixed_in=None,\nsupported=">=0.16.0,<=0.19.8",\nreleases="<=0.19.7",\n'


class Steps:
    """Stands for what is asked and started: notes the processes. One that begins so fails."""

    def __init__(self, binding: Path, patching: pytest.MonkeyPatch) -> None:
        self.binding = binding
        self.done: list[str] = []
        self.state = State.UNKNOWN_VERSION
        self.failing = "nothing"
        patching.setattr(support, "binding_of", lambda patch: binding)
        patching.setattr(support, "python", self.python)
        patching.setattr(support, "install", lambda wanted: 0)
        patching.setattr(support, "look", lambda: 0)
        patching.setattr(support.matrix, "ask", self.ask)

    def python(self, *arguments: str) -> int:
        self.done.append(" ".join(arguments))
        return int(self.done[-1].startswith(self.failing))

    def ask(self, version: str) -> dict[str, Answer]:
        """What the gate says of one patch; the others are fixed upstream."""
        fixed = dict.fromkeys(registry.patches(), Answer(State.FIXED_UPSTREAM, ""))
        return fixed | {"coalesce": Answer(self.state, "")}


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    file = tmp_path / "binding.py"
    file.write_text(BINDING, encoding="utf-8")
    return Steps(file, monkeypatch)


def test_only_the_range_of_the_patch_is_raised() -> None:
    assert support.raised(BINDING, "0.19.9") == BINDING.replace("0.19.8", "0.19.9")
    for patch in registry.patches().values():
        assert support.raised(support.binding_of(patch).read_text(), "9.9").count("<=9.9") == 1
    with pytest.raises(ValueError, match="supported"):
        support.raised("nothing", "0.19.9")


@pytest.mark.parametrize("state", [State.UNKNOWN_VERSION, State.READY])
def test_a_release_whose_shapes_are_known_is_recorded(steps: Steps, state: State) -> None:
    """Ready is what it is where the same call was stopped before."""
    steps.binding.write_text(BINDING.replace("0.19.8", "0.19.6"), encoding="utf-8")
    steps.state = state
    assert support.support(NEWEST) == 0
    assert f'supported=">=0.16.0,<={NEWEST}"' in steps.binding.read_text(encoding="utf-8")
    shapes, one, every = steps.done
    assert shapes.startswith("-m ds_patches record-shapes coalesce --releases ")
    assert one == f"-m tests.releases record {NEWEST}"
    assert every == "-m tests.releases record"


@pytest.mark.parametrize(
    ("state", "failing"),
    [(State.SHAPE_CHANGED, "nothing"), (State.UNKNOWN_VERSION, "-m ds_patches")],
    ids=["other code", "no shapes"],
)
def test_what_cannot_be_taken_is_left_to_a_person(
    steps: Steps, capsys: pytest.CaptureFixture[str], state: State, failing: str
) -> None:
    steps.state, steps.failing = state, failing
    assert support.support(NEWEST) == 1
    assert steps.binding.read_text(encoding="utf-8") == BINDING
    refused = "refused, because its code there is not what was tested: coalesce"
    assert refused in capsys.readouterr().out


def test_a_failure_there_ends_it(steps: Steps) -> None:
    steps.state = State.FIXED_UPSTREAM
    steps.failing = f"-m tests.releases record {NEWEST}"
    assert support.support(NEWEST) == 1
    assert steps.done == [steps.failing]


@pytest.mark.usefixtures("steps")
def test_a_release_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no release 99\.0"):
        support.support("99.0")
