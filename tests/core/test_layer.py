"""A wrapper around the method of one object: where it takes effect, and how it comes off."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from ds_patches.core import live
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
