"""Flags: their order, and that nothing unknown passes in silence."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ds_patches.core import flags
from ds_patches.core.errors import FlagError
from ds_patches.core.gate import Force
from ds_patches.core.patch import Option, Patch


def patch(name: str, *options: Option) -> Patch:
    return Patch(name, "", ">=0.16", (), options=options)


PATCHES = {
    "one": patch("one", Option("mode", "soft", ("soft", "hard"), "how")),
    "two_words": patch("two_words"),
    "three": patch(
        "three",
        Option("parts", ("top", "left"), ("left", "right", "top"), "which"),
        Option("side", "a", ("a", "b"), "which"),
    ),
    "four": patch(
        "four",
        Option("loud", "off", ("off", "on"), "whether"),
        Option("size", "8", ("8", "4"), "how many"),
        Option("way", "on", ("on", "store", "off"), "how"),
    ),
}
#: Of a test's environment, and of its call.
Env, Call = dict[str, str], dict[str, Any]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("DS_PATCHES")]:
        monkeypatch.delenv(name)


def read(monkeypatch: pytest.MonkeyPatch, env: Env, **call: Any) -> flags.Requests:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return flags.read(PATCHES, **call)


BOTH = ("one", "two_words")
ORDER: list[tuple[Env, Call, tuple[str, ...]]] = [
    ({}, {}, BOTH),
    ({"DS_PATCHES": "all"}, {}, BOTH),
    ({"DS_PATCHES": ""}, {}, BOTH),
    ({"DS_PATCHES": "none"}, {}, ()),
    ({"DS_PATCHES": "one"}, {}, ("one",)),
    ({"DS_PATCHES": " one , two_words "}, {}, BOTH),
    ({"DS_PATCHES_SKIP": "one"}, {}, ("two_words",)),
    ({"DS_PATCHES": "all", "DS_PATCHES_SKIP": "one"}, {}, ("two_words",)),
    # the patch's own variable beats the lists
    ({"DS_PATCHES": "none", "DS_PATCHES_ONE": "1"}, {}, ("one",)),
    ({"DS_PATCHES": "all", "DS_PATCHES_TWO_WORDS": "0"}, {}, ("one",)),
    ({"DS_PATCHES_SKIP": "one", "DS_PATCHES_ONE": "1"}, {}, BOTH),
    # the call beats everything
    ({"DS_PATCHES": "none"}, {"only": ["one"]}, ("one",)),
    ({"DS_PATCHES_ONE": "0"}, {"only": "one"}, ("one",)),
    ({"DS_PATCHES_SKIP": "one"}, {"only": ["one"]}, ("one",)),
    ({}, {"only": []}, ()),
    ({}, {"only": "one, two_words"}, BOTH),
    ({}, {"skip": "two_words+one"}, ()),
    ({"DS_PATCHES_ONE": "1"}, {"skip": ["one"]}, ("two_words",)),
    ({}, {"only": ["one", "two_words"], "skip": "one"}, ("two_words",)),
]


@pytest.mark.parametrize(("env", "call", "expected"), ORDER)
def test_order(
    monkeypatch: pytest.MonkeyPatch, env: Env, call: Call, expected: tuple[str, ...]
) -> None:
    requests = read(monkeypatch, env, **call)
    assert tuple(name for name in BOTH if requests.of[name].wanted) == expected


#: By patch: variables, the options of a call, and what comes of both, beside the defaults.
OPTIONS: dict[str, list[tuple[Env, Call, Env]]] = {
    "one": [
        ({}, {}, {"mode": "soft"}),
        ({"DS_PATCHES_ONE_MODE": "hard"}, {}, {"mode": "hard"}),
        ({"DS_PATCHES_ONE_MODE": "hard"}, {"mode": "soft"}, {"mode": "soft"}),
        ({"DS_PATCHES_ONE": "1"}, {}, {"mode": "soft"}),
    ],
    "three": [
        ({}, {}, {"parts": "left,top", "side": "a"}),
        ({"DS_PATCHES_THREE_PARTS": "right"}, {}, {"parts": "right"}),
        ({"DS_PATCHES_THREE_PARTS": " top , left "}, {}, {"parts": "left,top"}),
        ({"DS_PATCHES_THREE_PARTS": "top+left+top"}, {}, {"parts": "left,top"}),
        ({"DS_PATCHES_THREE_PARTS": "all"}, {}, {"parts": "left,right,top"}),
        ({"DS_PATCHES_THREE_PARTS": "top,all"}, {}, {"parts": "left,right,top"}),
        ({"DS_PATCHES_THREE_PARTS": "top"}, {"parts": "right,left"}, {"parts": "left,right"}),
        ({}, {"parts": ("right", "left")}, {"parts": "left,right"}),
        ({}, {"parts": ["all"]}, {"parts": "left,right,top"}),
        # the patch's own variable
        ({"DS_PATCHES_THREE": "1"}, {}, {"parts": "left,top"}),
        ({"DS_PATCHES_THREE": "all"}, {}, {"parts": "left,right,top"}),
        ({"DS_PATCHES_THREE": "right,left"}, {}, {"parts": "left,right"}),
        ({"DS_PATCHES_THREE": "right+left"}, {"parts": "top"}, {"parts": "top"}),
        (
            {"DS_PATCHES_THREE": "right", "DS_PATCHES_THREE_PARTS": "top,left"},
            {},
            {"parts": "left,top"},
        ),
    ],
    "four": [
        *(({}, {"loud": v}, {"loud": "on"}) for v in (True, 1, "1", "true", "Yes", "on")),
        *(({}, {"loud": v}, {"loud": "off"}) for v in (False, 0, "0", "False", "no", "off")),
        ({"DS_PATCHES_FOUR_LOUD": "Yes"}, {}, {"loud": "on"}),
        ({}, {"size": 4}, {"size": "4"}),
        ({"DS_PATCHES_FOUR_SIZE": "4"}, {}, {"size": "4"}),
        # beside other choices
        ({}, {"way": False}, {"way": "off"}),
        ({}, {"way": "store"}, {"way": "store"}),
    ],
}


@pytest.mark.parametrize(
    ("name", "env", "asked", "expected"),
    [(name, *row) for name, rows in OPTIONS.items() for row in rows],
)
def test_options(
    monkeypatch: pytest.MonkeyPatch, name: str, env: Env, asked: Call, expected: Env
) -> None:
    request = read(monkeypatch, {"DS_PATCHES": "none"} | env, options={name: asked}).of[name]
    assert request.options == {**flags.defaults(PATCHES[name]), **expected}
    assert request.wanted == (f"DS_PATCHES_{name.upper()}" in env), "choices are a yes"


def test_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not flags.read(PATCHES).strict
    monkeypatch.setenv("DS_PATCHES_STRICT", "1")
    assert flags.read(PATCHES).strict
    assert not flags.read(PATCHES, strict=False).strict


@pytest.mark.parametrize("by_call", [True, False])
def test_a_changed_shape_is_forced_by_name_only(
    monkeypatch: pytest.MonkeyPatch, by_call: bool
) -> None:
    def forced(text: str) -> list[Force]:
        monkeypatch.setenv("DS_PATCHES_FORCE", "" if by_call else text)
        requests = flags.read(PATCHES, force=text.split(",") if by_call else None)
        return [requests.of[name].force for name in BOTH]

    assert forced("all") == [Force.VERSION, Force.VERSION]
    assert forced("one") == [Force.SHAPE, Force.NO]
    assert forced("all,two_words") == [Force.VERSION, Force.SHAPE]


NAMES = "no patch is named .*; the patches are: one, two_words, three, four$"
#: What is no selection of parts, nor a yes or no.
NO_PARTS = (",", "rigth", "left,rigth", "left,1", "Left")


def near(meant: str) -> str:
    """What a typo is told."""
    return rf"\(did you mean '{meant}'\?\); .* are: ."


def four(**asked: Any) -> Call:
    return {"options": {"four": asked}}


MEANINGLESS: list[tuple[Env, Call, str]] = [
    ({"DS_PATCHES": "one,thre"}, {}, NAMES),
    ({"DS_PATCHES_SKIP": "thre"}, {}, NAMES),
    ({"DS_PATCHES_SKIP": "all"}, {}, NAMES),
    ({"DS_PATCHES": ","}, {}, NAMES),
    ({"DS_PATCHES_SKIP": "+"}, {}, NAMES),
    ({"DS_PATCHES": "all,none"}, {}, "'all,none': all and none stand alone"),
    ({"DS_PATCHES": "one+none"}, {}, "all and none stand alone"),
    ({"DS_PATCHES": "all,one"}, {}, "all and none stand alone"),
    ({"DS_PATCHES_FORCE": "thre"}, {}, NAMES),
    ({}, {"only": ["thre"]}, NAMES),
    ({}, {"only": "one,thre"}, NAMES),
    ({}, {"only": ""}, NAMES),
    ({}, {"skip": "thre"}, NAMES),
    ({}, {"force": ["thre"]}, NAMES),
    ({}, {"options": {"thre": {}}}, NAMES),
    ({"DS_PATCHES_FIVE": "1"}, {}, "DS_PATCHES_ONE_MODE"),
    ({"DS_PATCHES_ONE": "hard"}, {}, "0, 1$"),
    ({"DS_PATCHES_TWO_WORDS": "hard"}, {}, "0, 1$"),
    ({"DS_PATCHES_STRICT": "very"}, {}, "0, 1"),
    ({"DS_PATCHES_LOG": "loud"}, {}, "debug, info, warning"),
    *(({"DS_PATCHES_RANK_TIMEOUT": t}, {}, "number of secon") for t in ("2m", "nan", "inf", "-1")),
    ({"DS_PATCHES_ONE_MODE": "medium"}, {}, "soft, hard"),
    ({}, {"options": {"one": {"mode": "medium"}}}, "soft, hard"),
    ({}, {"options": {"one": {"mode": "soft,hard"}}}, "soft, hard"),
    ({}, {"options": {"one": {"mode": ("soft",)}}}, "soft, hard"),
    ({"DS_PATCHES": "one,tow_words"}, {}, near("two_words")),
    ({}, {"only": "Two-Words"}, near("two_words")),
    ({"DS_PATCHES_ONE_MOOD": "soft"}, {}, near("DS_PATCHES_ONE_MODE")),
    ({"DS_PATCHES_STRIKT": "1"}, {}, near("DS_PATCHES_STRICT")),
    ({"DS_PATCHES_ONE_MODE": "sotf"}, {}, near("soft")),
    ({"DS_PATCHES_ONE": "ture"}, {}, near("true")),
    ({"DS_PATCHES_STRICT": "yess"}, {}, near("yes")),
    ({"DS_PATCHES_LOG": "inof"}, {}, near("info")),
    ({}, {"options": {"one": {"mode": "Hard"}}}, near("hard")),
    ({}, {"options": {"one": {"mod": "hard"}}}, near("mode")),
    ({}, {"options": {"three": {"parts": "left,rigth"}}}, near("right")),
    # far from all that means something
    ({"DS_PATCHES_ZZZ": "zzz"}, {}, "means nothing; the variables are"),
    ({"DS_PATCHES_STRICT": "zzz"}, {}, "is 'zzz'; the choices are"),
    # several choices
    *(
        ({name: value}, {}, f"{name} is {value!r}.*; .*left, right, top, all$")
        for name in ("DS_PATCHES_THREE_PARTS", "DS_PATCHES_THREE")
        for value in NO_PARTS
    ),
    *(
        ({}, {"options": {"three": {"parts": value}}}, r"\(parts=...\) is .*left, right, top, all$")
        for value in ("", *NO_PARTS, (), ["rigth"], ("left,top",), True, None, {"left": False})
    ),
    # numbers and bools
    ({}, four(loud=2), r"four\(loud=...\) is 2; the choices are: off, on$"),
    *(({}, four(size=v), f"is {v!r}; the choices are: 8, 4$") for v in (3, True, 4.0, None)),
]


@pytest.mark.parametrize(("env", "call", "told"), MEANINGLESS)
def test_what_means_nothing_is_an_error_that_lists_what_does(
    monkeypatch: pytest.MonkeyPatch, env: Env, call: Call, told: str
) -> None:
    with pytest.raises(FlagError, match=told):
        read(monkeypatch, env, **call)


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    unset = flags.read(PATCHES)
    empty = dict.fromkeys((*flags.variables(PATCHES), "DS_PATCHES_OF_NOBODY"), "")
    assert read(monkeypatch, empty) == unset
    assert flags.rank_timeout() == flags.RANK_TIMEOUT
    assert not flags.is_strict()
