"""A wrapper is what its function is: to copies, to pickle, to inspect, to others' wrappers."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import typing
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import wrapt

from ds_patches.core import live
from ds_patches.core.calls import in_order
from ds_patches.core.layer import Layer
from ds_patches.core.patch import Place


def scale(value: int, by: int = 1) -> int:
    """Of a module."""
    return value * by


class Sheet:
    count = 0

    def scale(self, value: int, by: int = 1) -> int:
        """Of instances."""
        self.count += 1
        return value * by


def passing(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


def changing(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    """As many patches do: give the function another first argument."""
    value, *rest = in_order(wrapped, args, kwargs)
    return wrapped(10 * value, *rest)


@contextmanager
def wrapped(qualname: str, *arounds: Any) -> Iterator[Any]:
    """Wrappers in place, one over the other; yields the upper one."""
    where = live.site(Place(__name__, qualname)) or pytest.fail(qualname)
    layers = [Layer(*where, around) for around in arounds]
    try:
        yield layers[-1]
    finally:
        for layer in layers:
            layer.remove()


# --- What it is -----------------------------------------------------------------------------------

#: What is asked of a function of a module, of a method of a class, and of an instance's.
ASKED: dict[str, Callable[[Any], Any]] = {
    "signature": lambda one: str(inspect.signature(one)),
    "hints": typing.get_type_hints,
    "is a function": inspect.isfunction,
    "is a method": inspect.ismethod,
    "is a routine": inspect.isroutine,
    "source": inspect.getsource,
    "file": inspect.getsourcefile,
    "doc": inspect.getdoc,
    "name": lambda one: (one.__name__, one.__qualname__, one.__module__),
    "equal": lambda one: (one == one, hash(one) == hash(one), len({one, one})),
    "weakly": lambda one: weakref.ref(one)() is not None or inspect.ismethod(one),
    "wraps": lambda one: (functools.wraps(one)(lambda: 0).__name__, one(2, by=3)),
    "pickle": lambda one: pickle.dumps(one, 4),
    "unpickled": lambda one: pickle.loads(pickle.dumps(one))(2, by=3),
    "pickle of a partial": lambda one: pickle.dumps(functools.partial(one, 2), 4),
    "same": lambda one: (copy.copy(one) == one, type(copy.deepcopy([one])[0](2))),
    "deep": lambda one: inspect.ismethod(one) or copy.deepcopy({"at": one})["at"] is one,
    "of another": lambda one: (
        inspect.ismethod(one) and copy.deepcopy(one).__self__ is not one.__self__
    ),
    "partial": lambda one: copy.deepcopy(functools.partial(one, 2))(by=3),
}
SHEET = Sheet()
FUNCTIONS = {
    "scale": lambda: scale,
    "Sheet.scale": lambda: functools.partial(Sheet.scale).func,
    "SHEET.scale": lambda: SHEET.scale,
}


def answer(question: str, function: str) -> Any:
    try:
        return ASKED[question](FUNCTIONS[function]())
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("question", ASKED)
def test_it_answers_as_its_function(question: str, function: str) -> None:
    expected = answer(question, function)
    with wrapped(function.replace("SHEET", "Sheet"), passing):
        assert answer(question, function) == expected


def test_a_wrapper_that_was_taken_out_is_pickled_as_its_function() -> None:
    with wrapped("scale", passing) as layer:
        pass
    assert pickle.loads(pickle.dumps(layer.installed)) is scale


# --- What another library's wrapper beneath takes besides ----------------------------------------


def theirs(function: Any, seen: list[Any]) -> Any:
    @functools.wraps(function)
    def around(*args: Any, tag: str = "", **kwargs: Any) -> Any:
        seen.append(tag)
        return function(*args, **kwargs)

    return around


def proxy(function: Any, seen: list[Any]) -> Any:
    def around(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        seen.append(kwargs.pop("tag", ""))
        return wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(function, around)


@pytest.mark.parametrize("library", [theirs, proxy])
@pytest.mark.parametrize("name", ["scale", "Sheet.scale", "sheet.scale"])
def test_another_keyword_passes_and_nothing_runs_twice(
    library: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    sheet = Sheet()
    if name == "sheet.scale":
        vars(sheet)["scale"] = library(sheet.scale, seen)
        Layer(sheet, "scale", changing)
        assert sheet.scale(by=3, value=2, tag="a") == 60
    else:
        owner, _, attribute = name.rpartition(".")
        place: Any = Sheet if owner else sys.modules[__name__]
        monkeypatch.setattr(place, attribute, library(vars(place)[attribute], seen))
        with wrapped(name, changing, changing):
            call = sheet.scale if owner else scale
            assert call(by=3, value=2, tag="a") == 600
            assert call(2, 3) == 600
    assert seen == ["a", ""][: len(seen)]
    assert sheet.count in (0, len(seen))


@pytest.mark.parametrize("given", [{}, {"value": 1, "tag": 1}, {"by": 2}])
def test_a_call_that_does_not_fit_is_an_error_and_runs_nothing(given: dict[str, int]) -> None:
    sheet = Sheet()
    with wrapped("Sheet.scale", changing), pytest.raises(TypeError):
        sheet.scale(**given)
    assert not sheet.count
