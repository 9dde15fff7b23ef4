"""A wrapper around the method of one object: where it takes effect, and how it comes off."""

from __future__ import annotations

from functools import wraps
from itertools import permutations
from typing import Any

import pytest

from ds_patches.core import live
from ds_patches.core.calls import in_order
from ds_patches.core.layer import Layer


class Bell:
    def ring(self, times: int = 1) -> str:
        return " ".join(["ding"] * times)


def louder(wrapped: Any, _: Any, args: Any, kwargs: Any) -> str:
    return str(wrapped(*args, **kwargs)).upper()


def around(function: Any) -> Any:
    """What another library puts around a method."""
    return lambda *args, **kwargs: f"({function(*args, **kwargs)})"


def test_beside_a_function_of_another_library() -> None:
    """Over ours, ours stays there and passes straight through; beneath ours, theirs comes back."""
    bell: Any = Bell()
    layer = Layer(bell, "ring", louder)
    assert bell.ring(2) == bell.ring(times=2) == "DING DING"
    assert Bell().ring() == "ding", "it is around the method of one object"
    bell.ring = theirs = around(bell.ring)
    assert bell.ring() == "(DING)"
    layer.remove()
    assert bell.ring() == "(ding)"
    again = Layer(bell, "ring", louder)
    assert bell.ring() == "(DING)"
    ours = vars(bell)["ring"]
    bell.ring = lambda: "clang"
    assert not live.leads_to(bell.ring, Bell.ring)
    again.remove()
    assert bell.ring() == "clang"
    bell.ring = ours
    assert bell.ring() == "(ding)", "put back by somebody, it takes no effect"
    again.remove()
    assert vars(bell) == {"ring": theirs}


def test_beneath_what_cannot_be_seen() -> None:
    """A library hides the upper of two layers, and puts it back when the lower is gone."""
    bell: Any = Bell()
    lower = Layer(bell, "ring", louder)
    upper = Layer(bell, "ring", lambda ring, *_: f"[{ring()}]")
    hidden = [bell.ring]
    bell.ring = lambda: hidden[0]()
    lower.remove()
    bell.ring = hidden[0]
    assert bell.ring() == "[ding]"
    upper.remove()
    assert not vars(bell)


def test_a_method_that_was_replaced_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    bell = Bell()
    layer = Layer(bell, "ring", louder)
    del vars(bell)["ring"]
    monkeypatch.setattr(Bell, "ring", lambda self: "clang")
    assert layer.comes_back()
    assert bell.ring() == "CLANG"


def test_a_keyword_of_another_librarys_wrapper_at_the_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Bell.ring

    @wraps(own)
    def theirs(self: Bell, *args: Any, mark: str = "", **kwargs: Any) -> str:
        return own(self, *args, **kwargs) + mark

    monkeypatch.setattr(Bell, "ring", theirs)
    bell = Bell()
    Layer(bell, "ring", lambda ring, _, args, kwargs: ring(*in_order(ring, args, kwargs)))
    assert bell.ring(2, mark="!") == "ding ding!"


@pytest.mark.parametrize("order", [*permutations("abc")])
def test_layers_come_off_in_any_order(order: tuple[str, ...]) -> None:
    bell = Bell()
    left = {
        mark: Layer(bell, "ring", lambda ring, *_, mark=mark: f"{mark}{ring()}") for mark in "abc"
    }
    assert live.leads_to(bell.ring, Bell.ring), "as the look at replaced methods finds it"
    for mark in order:
        taken = left.pop(mark)
        taken.remove()
        assert not live.leads_to(bell.ring, taken.installed), "calls go past it"
        assert bell.ring() == "".join(reversed(left)) + "ding"
    assert not vars(bell)
