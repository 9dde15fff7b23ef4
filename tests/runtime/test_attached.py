"""What a patch knows of the things it has attached."""

from __future__ import annotations

import gc
import weakref

from ds_patches.runtime.attached import Attached


class Thing:
    pass


def test_a_thing_is_taken_in_once() -> None:
    asked: list[Thing] = []
    attached: Attached[str] = Attached("sample", lambda thing: asked.append(thing) or "state")
    thing = Thing()
    assert attached.get(thing) is None
    assert attached(thing) == attached(thing) == attached.get(thing) == "state"
    assert asked == [thing]


def test_what_is_left_to_stock_is_not_asked_again() -> None:
    asked: list[Thing] = []
    attached: Attached[str] = Attached("sample", asked.append)  # type: ignore[arg-type]
    thing = Thing()
    assert attached(thing) is attached(thing) is None
    assert asked == [thing]
    assert attached.all() == []


def test_parts_answer_too_and_all_is_forgotten() -> None:
    attached: Attached[str] = Attached("sample", lambda thing: "state")
    thing, part = Thing(), Thing()
    attached(thing)
    attached.share(part, "state")
    assert attached.get(part) == "state"
    assert attached.detach_all() == [(thing, "state")]
    assert not vars(thing)
    assert not vars(part)
    assert attached(thing) == "state", "and it can be attached again"


def test_a_thing_that_cannot_be_taken_in_is_asked_again() -> None:
    answers = iter([ValueError("not now"), "state"])

    def take_in(thing: Thing) -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    attached: Attached[str] = Attached("sample", take_in)
    thing = Thing()
    try:
        attached(thing)
    except ValueError:
        assert attached.get(thing) is None
    assert attached(thing) == "state"


def test_nothing_is_kept_alive() -> None:
    attached: Attached[str] = Attached("sample", lambda thing: "state")
    thing = Thing()
    attached(thing)
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None
    assert attached.all() == []
