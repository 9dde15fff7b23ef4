"""Attributes that read otherwise for a while."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_patches.core import live
from ds_patches.runtime.attributes import Shadow, meanwhile


def test_they_are_put_back_also_after_an_exception() -> None:
    thing = SimpleNamespace(one=1, two=2)
    with meanwhile(thing, one=None, two=3):
        assert vars(thing) == {"one": None, "two": 3}
    assert vars(thing) == {"one": 1, "two": 2}
    with pytest.raises(KeyError), meanwhile(thing, one=2):
        raise KeyError
    assert thing.one == 1


def test_an_attribute_that_is_not_there_is_an_error() -> None:
    thing = SimpleNamespace(one=1)
    with pytest.raises(AttributeError), meanwhile(thing, one=2, other=3):
        pass
    assert vars(thing) == {"one": 1}


class Bell:
    def ring(self, times: int = 1) -> str:
        return " ".join(["ding"] * times)


def louder(wrapped: Any, *args: Any, **kwargs: Any) -> str:
    return str(wrapped(*args, **kwargs)).upper()


def longer(wrapped: Any, *args: Any, **kwargs: Any) -> str:
    return f"{wrapped(*args, **kwargs)} dong"


def test_shadows_are_around_the_method_of_one_object_and_come_off_from_the_top() -> None:
    bell = Bell()
    inner = Shadow(bell, "ring", louder)
    assert bell.ring(2) == bell.ring(times=2) == "DING DING"
    assert Bell().ring() == "ding"
    outer = Shadow(bell, "ring", longer)
    assert bell.ring() == "DING dong"
    assert live.leads_to(bell.ring, Bell.ring), "as the watch over replaced methods looks for it"
    outer.remove()
    assert bell.ring() == "DING"
    for _ in range(2):  # the second time changes nothing
        inner.remove()
        assert bell.ring() == "ding"
        assert not vars(bell)


def test_a_function_in_its_place_stays_and_what_was_there_comes_back() -> None:
    bell = Bell()
    gong = bell.ring = lambda: "gong"  # type: ignore[method-assign]
    shadow = Shadow(bell, "ring", louder)
    assert bell.ring() == "GONG"
    ours = vars(bell)["ring"]
    bell.ring = lambda: "clang"  # type: ignore[method-assign]
    assert not live.leads_to(bell.ring, Bell.ring)
    assert not shadow.remove()
    assert bell.ring() == "clang"
    bell.ring = ours  # type: ignore[method-assign]
    assert shadow.remove()
    assert vars(bell) == {"ring": gong}
