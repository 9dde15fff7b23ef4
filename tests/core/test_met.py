"""What a patch knows of the things it has met."""

from __future__ import annotations

import gc
import weakref

from ds_patches.core.met import Met


class Thing:
    pass


def test_a_thing_is_taken_in_once() -> None:
    asked: list[Thing] = []
    met: Met[str] = Met("sample", lambda thing: asked.append(thing) or "state")
    thing = Thing()
    assert met.known(thing) is None
    assert met(thing) == met(thing) == met.known(thing) == "state"
    assert asked == [thing]


def test_what_is_left_to_stock_is_not_asked_again() -> None:
    asked: list[Thing] = []
    met: Met[str] = Met("sample", asked.append)  # type: ignore[arg-type]
    thing = Thing()
    assert met(thing) is met(thing) is None
    assert asked == [thing]
    assert met.all() == []


def test_parts_answer_too_and_all_is_forgotten() -> None:
    met: Met[str] = Met("sample", lambda thing: "state")
    thing, part = Thing(), Thing()
    met(thing)
    met.shares(part, "state")
    assert met.known(part) == "state"
    assert met.let_go() == [(thing, "state")]
    assert not vars(thing)
    assert not vars(part)
    assert met(thing) == "state", "and it can be met again"


def test_a_thing_that_cannot_be_taken_in_is_asked_again() -> None:
    answers = iter([ValueError("not now"), "state"])

    def take_in(thing: Thing) -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    met: Met[str] = Met("sample", take_in)
    thing = Thing()
    try:
        met(thing)
    except ValueError:
        assert met.known(thing) is None
    assert met(thing) == "state"


def test_nothing_is_kept_alive() -> None:
    met: Met[str] = Met("sample", lambda thing: "state")
    thing = Thing()
    met(thing)
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None
    assert met.all() == []
