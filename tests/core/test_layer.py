"""A wrapper around the method of one object: where it takes effect, and how it comes off."""

import copy
from itertools import permutations
from typing import Any

import pytest

from ds_patches.core import live
from ds_patches.core.layer import Layer, layered


class Bell:
    def ring(self, times: int = 1) -> str:
        return " ".join(["ding"] * times)


def louder(wrapped: Any, _: Any, args: Any, kwargs: Any) -> str:
    return str(wrapped(*args, **kwargs)).upper()


@pytest.fixture
def bell() -> Any:
    return Bell()


def test_beside_a_function_of_another_library(bell: Any) -> None:
    """Over ours, ours stays there and passes straight through; beneath ours, theirs comes back."""
    layer = Layer(bell, "ring", louder)
    assert bell.ring(2) == bell.ring(times=2) == "DING DING"
    assert Bell().ring() == "ding", "it is around the method of one object"
    ours = bell.ring
    bell.ring = theirs = lambda: f"({ours()})"
    assert bell.ring() == "(DING)"
    layer.remove()
    assert bell.ring() == "(ding)"
    again = Layer(bell, "ring", louder)
    assert bell.ring() == "(DING)"
    ours_again = vars(bell)["ring"]
    bell.ring = lambda: "clang"
    assert again.above() is None
    again.remove()
    assert bell.ring() == "clang"
    bell.ring = ours_again
    assert bell.ring() == "(ding)", "put back by somebody, it takes no effect"
    again.remove()
    assert vars(bell) == {"ring": theirs}


@pytest.mark.parametrize("order", [*permutations("abc")])
def test_layers_come_off_in_any_order(bell: Any, order: tuple[str, ...]) -> None:
    left = {
        mark: Layer(bell, "ring", lambda ring, *_, mark=mark: f"{mark}{ring()}") for mark in "abc"
    }
    for mark in order:
        taken = left.pop(mark)
        taken.remove()
        assert not any(layer is taken.installed for layer in live.chain(bell.ring))
        assert bell.ring() == "".join(reversed(left)) + "ding"
    assert not vars(bell)


def test_a_copy_of_an_object_has_methods_of_its_own(bell: Any) -> None:
    """And no wrapper: that is the original's."""
    layers = [Layer(bell, "ring", louder) for _ in range(2)]
    copied = copy.deepcopy(bell)
    assert copied.ring() == "ding"
    assert copied.ring.__self__ is copied
    for layer in layers:
        layer.remove()
    assert bell.ring() == "ding"


def test_layers_for_a_while_come_off_if_one_cannot_be_put(bell: Any) -> None:
    with pytest.raises(AttributeError), layered(bell, ring=louder, rung=louder):
        pass
    assert not vars(bell)


@pytest.mark.parametrize("carrier", [classmethod, staticmethod])
def test_only_functions_are_wrapped(carrier: Any) -> None:
    """Where Dynamo traces a call of another, it would call the original, without a word."""
    kind = type("Kind", (), {"ring": carrier(Bell.ring)})
    with pytest.raises(TypeError, match=f"Kind.ring is a {carrier.__name__}"):
        Layer(kind, "ring", louder)


def test_beneath_what_cannot_be_seen(bell: Any) -> None:
    """A library hides the upper of two layers, and puts it back when the lower is gone."""
    lower = Layer(bell, "ring", louder)
    upper = Layer(bell, "ring", lambda ring, *_: f"[{ring()}]")
    hidden = [bell.ring]
    bell.ring = lambda: hidden[0]()
    lower.remove()
    bell.ring = hidden[0]
    assert bell.ring() == "[ding]"
    upper.remove()
    assert not vars(bell)
