"""Attributes that read otherwise for a while."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_patches.core import live
from ds_patches.runtime.attributes import Shadow, meanwhile


def test_they_are_put_back() -> None:
    thing = SimpleNamespace(one=1, two=2)
    with meanwhile(thing, one=None, two=3):
        assert vars(thing) == {"one": None, "two": 3}
    assert vars(thing) == {"one": 1, "two": 2}


def test_they_are_put_back_after_an_exception() -> None:
    thing = SimpleNamespace(one=1)
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


def test_a_shadow_is_around_the_method_of_one_object() -> None:
    bell = Bell()
    shadow = Shadow(bell, "ring", louder)
    assert bell.ring(2) == bell.ring(times=2) == "DING DING"
    assert Bell().ring() == "ding"
    shadow.remove()
    assert bell.ring() == "ding"
    assert not vars(bell)
    shadow.remove()  # again, which changes nothing
    assert not vars(bell)


def test_shadows_come_off_from_the_top() -> None:
    bell = Bell()
    inner, outer = Shadow(bell, "ring", louder), Shadow(bell, "ring", longer)
    assert bell.ring() == "DING dong"
    outer.remove()
    assert bell.ring() == "DING"
    inner.remove()
    assert not vars(bell)


def test_a_function_in_its_place_stays() -> None:
    bell = Bell()
    shadow = Shadow(bell, "ring", louder)
    bell.ring = lambda: "gong"  # type: ignore[method-assign]
    shadow.remove()
    assert bell.ring() == "gong"


def test_what_was_at_the_object_comes_back() -> None:
    bell = Bell()
    before = bell.ring = lambda: "gong"  # type: ignore[method-assign]
    shadow = Shadow(bell, "ring", louder)
    assert bell.ring() == "GONG"
    shadow.remove()
    assert vars(bell) == {"ring": before}


def test_the_method_is_found_through_it() -> None:
    """As the watch over replaced methods looks for it."""
    bell = Bell()
    Shadow(bell, "ring", louder)
    Shadow(bell, "ring", longer)
    assert live.leads_to(bell.ring, Bell.ring)
    bell.ring = lambda: "gong"  # type: ignore[method-assign]
    assert not live.leads_to(bell.ring, Bell.ring)
