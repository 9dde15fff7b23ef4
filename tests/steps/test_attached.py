"""State that a patch attaches to objects."""

import gc
import weakref

import pytest

from ds_patches.steps.attached import Attached


class Thing:
    pass


@pytest.mark.parametrize("state", ["state", None])
def test_a_thing_is_asked_once_and_not_kept_alive(state: str | None) -> None:
    """Also one that is left to stock."""
    asked: list[int] = []
    attached: Attached[str] = Attached("sample", lambda owner: asked.append(1) or state)
    owner = Thing()
    assert attached.get(owner) is None
    assert attached(owner) == attached(owner) == attached.get(owner) == state
    assert asked == [1]
    assert attached.all() == ([(owner, state)] if state else [])
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    assert attached.all() == []


def test_a_thing_that_cannot_be_taken_in_is_asked_again() -> None:
    answers = iter(["", "state"])
    attached: Attached[str] = Attached("sample", lambda owner: next(answers) or 1 / 0)
    owner = Thing()
    with pytest.raises(ZeroDivisionError):
        attached(owner)
    assert attached.get(owner) is None
    assert attached(owner) == "state"
