"""The arguments of a call, and attributes that read otherwise for a while."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import wrapt

from ds_patches.core.calls import in_order, meanwhile


def test_attributes_are_put_back_also_after_an_exception() -> None:
    owner = SimpleNamespace(one=1, two=2)
    with meanwhile(owner, one=None, two=3):
        assert vars(owner) == {"one": None, "two": 3}
    with pytest.raises(KeyError), meanwhile(owner, one=2):
        raise KeyError
    assert vars(owner) == {"one": 1, "two": 2}


class Scales:
    def weigh(self, left: int, right: int, scale: float = 1.0, unit: str = "kg") -> None:
        """Stand for a method that is wrapped."""


def of_a_module(left: int, right: int = 2) -> None:
    """The same, bound to nothing."""


def by_name(left: int, *, unit: str = "kg") -> None:
    """One argument has no place in the order."""


WEIGH = Scales().weigh


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (WEIGH, (1, 2), {}, (1, 2)),
        (WEIGH, (1,), {"right": 2}, (1, 2)),
        (WEIGH, (), {"right": 2, "left": 1}, (1, 2)),
        (WEIGH, (1, 2), {"unit": "g"}, (1, 2, 1.0, "g")),
        (of_a_module, (), {"right": 3, "left": 1}, (1, 3)),
        (of_a_module, (1,), {}, (1,)),
        (by_name, (1,), {}, (1,)),
        *((WEIGH, args, {}, r"weigh\(\) .*(left|many)") for args in ((), (1, 2, 3, 4, 5))),
        *((WEIGH, (1, *more), {"left": 2}, r"weigh\(\) .*left") for more in ((), (2,))),
        (WEIGH, (1, 2), {"no": 1}, r"weigh\(\) .*no"),
        (WEIGH, (), {"right": 2}, r"weigh\(\) .*left"),
        (by_name, (1,), {"unit": "g"}, "unit only by name"),
    ],
)
def test_arguments_have_the_order_of_the_original(
    function: Any, args: tuple[int, ...], kwargs: dict[str, Any], expected: Any
) -> None:
    """Expected: the arguments, or the words of a TypeError."""
    around = wrapt.FunctionWrapper(function, lambda wrapped, _, args, kwargs: None)
    is_error = isinstance(expected, str)
    with pytest.raises(TypeError, match=expected) if is_error else nullcontext():
        assert in_order(function, args, kwargs) == in_order(around, args, kwargs) == expected
