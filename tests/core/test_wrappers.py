"""A wrapper is what its function is: to copies, to pickle, to inspect, to others' wrappers."""

import copy
import functools
import inspect
import pickle
import sys
import typing
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from ds_patches.core.layer import Layer, layered


def scale(value: int, by: int = 1) -> int:
    """Scale, as a function of a module."""
    return value * by


class Sheet:
    def scale(self, value: int, by: int = 1) -> int:
        """Scale, as a method of instances."""
        return value * by


def passing(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


#: What is asked of a function of a module, of a method of a class, and of an instance's.
ASKED: dict[str, Callable[[Any], Any]] = {
    "hints": typing.get_type_hints,
    "is a function": inspect.isfunction,
    "is a method": inspect.ismethod,
    "source": inspect.getsource,
    "name": lambda f: (f.__name__, f.__qualname__, f.__module__),
    "equal": lambda f: (f == f, hash(f) == hash(f), len({f, f})),
    "weakly": lambda f: weakref.ref(f)() is not None or inspect.ismethod(f),
    "wraps": lambda f: (functools.wraps(f)(lambda: 0).__name__, f(2, by=3)),
    "pickle": lambda f: pickle.dumps(f, 4),
    "pickle of a partial": lambda f: pickle.dumps(functools.partial(f, 2), 4),
    "same": lambda f: (copy.copy(f) == f, type(copy.deepcopy([f])[0](2))),
    "deep": lambda f: inspect.ismethod(f) or copy.deepcopy({"at": f})["at"] is f,
    "of another": lambda f: inspect.ismethod(f) and copy.deepcopy(f).__self__ is not f.__self__,
}
HERE, SHEET = sys.modules[__name__], Sheet()
#: By who has the wrapper, and how the function is asked for.
FUNCTIONS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "of a module": (HERE, lambda: scale),
    "of a class": (Sheet, lambda: functools.partial(Sheet.scale).func),
    "of an instance": (Sheet, lambda: SHEET.scale),
}


def answer(question: str, function: Callable[[], Any]) -> Any:
    try:
        return ASKED[question](function())
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("question", ASKED)
def test_it_answers_as_its_function(question: str, kind: str) -> None:
    owner, function = FUNCTIONS[kind]
    expected = answer(question, function)
    with layered(owner, scale=passing):
        assert answer(question, function) == expected


def test_a_wrapper_that_was_taken_out_is_pickled_as_its_function() -> None:
    layer = Layer(HERE, "scale", passing)
    layer.remove()
    assert pickle.loads(pickle.dumps(layer.installed)) is scale
