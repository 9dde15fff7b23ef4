"""What a patch knows of the things it has attached."""

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
    attached: Attached[str] = Attached("sample", lambda thing: asked.append(1) or state)
    thing = Thing()
    assert attached.get(thing) is None
    assert attached(thing) == attached(thing) == attached.get(thing) == state
    assert asked == [1]
    assert attached.all() == ([(thing, state)] if state else [])
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None
    assert attached.all() == []


def test_a_thing_that_cannot_be_taken_in_is_asked_again() -> None:
    answers = iter(["", "state"])
    attached: Attached[str] = Attached("sample", lambda thing: next(answers) or 1 / 0)
    thing = Thing()
    with pytest.raises(ZeroDivisionError):
        attached(thing)
    assert attached.get(thing) is None
    assert attached(thing) == "state"
