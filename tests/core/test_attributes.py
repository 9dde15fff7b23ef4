"""Attributes that read otherwise for a while."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ds_patches.core.attributes import meanwhile


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
