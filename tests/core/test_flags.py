"""Flags: their order, and that nothing unknown passes in silence."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
}
SWITCH = Option("loud", "off", ("off", "on"), "whether")
SIZES = {
    "four": patch("four", SWITCH, Option("size", "8", ("8", "4"), "how many")),
    "three_ways": patch("three_ways", Option("way", "on", ("on", "store", "off"), "how")),
}
PARTS = Option("parts", ("top", "left"), ("left", "right", "top"), "which")
OF_PARTS = {
    "three": patch("three", PARTS, Option("side", "a", ("a", "b"), "which")),
    "other": patch("other"),
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("DS_PATCHES")]:
        monkeypatch.delenv(name)


def wanted(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], **call: Any) -> str:
    _set(monkeypatch, env)
    return " ".join(n for n, request in flags.read(PATCHES, **call).of.items() if request.wanted)


def _set(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)


BOTH = "one two_words"
ORDER: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({}, {}, BOTH),
    ({"DS_PATCHES": "all"}, {}, BOTH),
    ({"DS_PATCHES": ""}, {}, BOTH),
    ({"DS_PATCHES": "none"}, {}, ""),
    ({"DS_PATCHES": "one"}, {}, "one"),
    ({"DS_PATCHES": " one , two_words "}, {}, BOTH),
    ({"DS_PATCHES_SKIP": "one"}, {}, "two_words"),
    ({"DS_PATCHES": "all", "DS_PATCHES_SKIP": "one"}, {}, "two_words"),
    # the patch's own variable beats the lists
    ({"DS_PATCHES": "none", "DS_PATCHES_ONE": "1"}, {}, "one"),
    ({"DS_PATCHES": "all", "DS_PATCHES_TWO_WORDS": "0"}, {}, "one"),
    ({"DS_PATCHES_SKIP": "one", "DS_PATCHES_ONE": "1"}, {}, BOTH),
    # the call beats everything
    ({"DS_PATCHES": "none"}, {"only": ["one"]}, "one"),
    ({"DS_PATCHES_ONE": "0"}, {"only": "one"}, "one"),
    ({"DS_PATCHES_SKIP": "one"}, {"only": ["one"]}, "one"),
    ({}, {"only": []}, ""),
    ({}, {"only": "one, two_words"}, BOTH),
    ({}, {"skip": "two_words+one"}, ""),
    ({"DS_PATCHES_ONE": "1"}, {"skip": ["one"]}, "two_words"),
    ({}, {"only": ["one", "two_words"], "skip": "one"}, "two_words"),
]


@pytest.mark.parametrize(("env", "call", "expected"), ORDER)
def test_order(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], call: dict[str, Any], expected: str
) -> None:
    assert wanted(monkeypatch, env, **call) == expected


@pytest.mark.parametrize(
    ("env", "call", "expected"),
    [
        ({}, {}, "soft"),
        ({"DS_PATCHES_ONE_MODE": "hard"}, {}, "hard"),
        ({"DS_PATCHES_ONE_MODE": "hard"}, {"options": {"one": {"mode": "soft"}}}, "soft"),
        ({"DS_PATCHES_ONE": "1"}, {}, "soft"),
    ],
)
def test_options(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], call: dict[str, Any], expected: str
) -> None:
    _set(monkeypatch, env)
    assert flags.read(PATCHES, **call).of["one"].options == {"mode": expected}


SEVERAL: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({}, {}, "left,top"),
    ({"DS_PATCHES_THREE_PARTS": "right"}, {}, "right"),
    ({"DS_PATCHES_THREE_PARTS": " top , left "}, {}, "left,top"),
    ({"DS_PATCHES_THREE_PARTS": "top+left+top"}, {}, "left,top"),
    ({"DS_PATCHES_THREE_PARTS": "all"}, {}, "left,right,top"),
    ({"DS_PATCHES_THREE_PARTS": "top,all"}, {}, "left,right,top"),
    ({"DS_PATCHES_THREE_PARTS": "top"}, {"parts": "right,left"}, "left,right"),
    ({}, {"parts": ("right", "left")}, "left,right"),
    ({}, {"parts": ["all"]}, "left,right,top"),
    # the patch's own variable
    ({"DS_PATCHES_THREE": "1"}, {}, "left,top"),
    ({"DS_PATCHES_THREE": "all"}, {}, "left,right,top"),
    ({"DS_PATCHES_THREE": "right,left"}, {}, "left,right"),
    ({"DS_PATCHES_THREE": "right+left"}, {"parts": "top"}, "top"),
    ({"DS_PATCHES_THREE": "right", "DS_PATCHES_THREE_PARTS": "top,left"}, {}, "left,top"),
]


@pytest.mark.parametrize(("env", "asked", "expected"), SEVERAL)
def test_several_choices_have_one_spelling(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], asked: dict[str, Any], expected: str
) -> None:
    _set(monkeypatch, {"DS_PATCHES": "other"} | env)
    request = flags.read(OF_PARTS, options={"three": asked}).of["three"]
    assert request.options == {"parts": expected, "side": "a"}
    assert request.wanted == ("DS_PATCHES_THREE" in env), "choices are a yes"


NO_SELECTION = (",", "rigth", "left,rigth", "left,1", "Left")


@pytest.mark.parametrize("variable", ["DS_PATCHES_THREE_PARTS", "DS_PATCHES_THREE"])
@pytest.mark.parametrize("value", NO_SELECTION)
def test_a_variable_that_is_no_selection_is_an_error_that_lists_the_choices(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(FlagError, match=f"{variable} is {value!r}.*; .*left, right, top, all$"):
        flags.read(OF_PARTS)


@pytest.mark.parametrize(
    "value", ["", *NO_SELECTION, (), ["rigth"], ("left,top",), True, None, {"left": False}]
)
def test_an_argument_that_is_no_selection_is_an_error_that_lists_the_choices(value: Any) -> None:
    with pytest.raises(
        FlagError, match=r"three\(parts=...\) is .*; .* are: left, right, top, all$"
    ):
        flags.read(OF_PARTS, options={"three": {"parts": value}})


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
        return [request.force for request in requests.of.values()]

    assert forced("all") == [Force.VERSION, Force.VERSION]
    assert forced("one") == [Force.SHAPE, Force.NO]
    assert forced("all,two_words") == [Force.VERSION, Force.SHAPE]


NAMES = "no patch is named .*; the patches are: one, two_words$"
NO_SECONDS = ("2m", "nan", "inf", "-1")


def near(meant: str) -> str:
    """What a typo is told."""
    return rf"\(did you mean '{meant}'\?\); .* are: ."


MEANINGLESS: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"DS_PATCHES": "one,thre"}, {}, NAMES),
    ({"DS_PATCHES_SKIP": "thre"}, {}, NAMES),
    ({"DS_PATCHES_SKIP": "all"}, {}, NAMES),
    ({"DS_PATCHES_FORCE": "thre"}, {}, NAMES),
    ({}, {"only": ["thre"]}, NAMES),
    ({}, {"only": "one,thre"}, NAMES),
    ({}, {"only": ""}, NAMES),
    ({}, {"skip": "thre"}, NAMES),
    ({}, {"force": ["thre"]}, NAMES),
    ({}, {"options": {"thre": {}}}, NAMES),
    ({"DS_PATCHES_THREE": "1"}, {}, "DS_PATCHES_ONE_MODE"),
    ({"DS_PATCHES_ONE": "hard"}, {}, "0, 1$"),
    ({"DS_PATCHES_TWO_WORDS": "hard"}, {}, "0, 1$"),
    ({"DS_PATCHES_STRICT": "very"}, {}, "0, 1"),
    ({"DS_PATCHES_LOG": "loud"}, {}, "debug, info, warning"),
    *(({"DS_PATCHES_RANK_TIMEOUT": t}, {}, "number of seconds") for t in NO_SECONDS),
    ({"DS_PATCHES": "all,none"}, {}, "'all,none': all and none stand alone"),
    ({"DS_PATCHES": "one+none"}, {}, "all and none stand alone"),
    ({"DS_PATCHES": "all,one"}, {}, "all and none stand alone"),
    ({"DS_PATCHES": ","}, {}, "all, none, one, two_words"),
    ({"DS_PATCHES_SKIP": "+"}, {}, "one, two_words"),
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
]


@pytest.mark.parametrize(("env", "call", "told"), MEANINGLESS)
def test_what_means_nothing_is_an_error_that_lists_what_does(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], call: dict[str, Any], told: str
) -> None:
    with pytest.raises(FlagError, match=told):
        wanted(monkeypatch, env, **call)


def test_of_several_choices_the_wrong_one_is_told_what_is_near() -> None:
    with pytest.raises(FlagError, match=r"is 'left,rigth' \(did you mean 'right'\?\)"):
        flags.read(OF_PARTS, options={"three": {"parts": "left,rigth"}})


def test_what_is_far_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DS_PATCHES_ZZZ", "DS_PATCHES_STRICT"):
        monkeypatch.setenv(variable, "zzz")
        with pytest.raises(FlagError) as error:
            flags.read(PATCHES)
        assert "did you mean" not in str(error.value)
        monkeypatch.delenv(variable)


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    unset = flags.read(OF_PARTS)
    for variable in (*flags.variables(OF_PARTS), "DS_PATCHES_OF_NOBODY"):
        monkeypatch.setenv(variable, "")
    assert flags.read(OF_PARTS) == unset
    assert flags.rank_timeout() == flags.RANK_TIMEOUT
    assert not flags.is_strict()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        *(({"loud": value}, {"loud": "on"}) for value in (True, 1, "1", "true", "Yes", "on")),
        *(({"loud": value}, {"loud": "off"}) for value in (False, 0, "0", "False", "no", "off")),
        ({"size": 4}, {"size": "4"}),
        ({"size": "4"}, {"size": "4"}),
    ],
)
def test_numbers_and_bools_are_what_they_mean(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], expected: dict[str, str]
) -> None:
    def found(**call: Any) -> Mapping[str, str]:
        return flags.read(SIZES, **call).of["four"].options

    whole = {"loud": "off", "size": "8"} | expected
    assert found(options={"four": asked}) == whole
    ((name, value),) = asked.items()
    monkeypatch.setenv(f"DS_PATCHES_FOUR_{name.upper()}", str(value))
    assert found() == whole


def test_yes_and_no_are_on_and_off_beside_other_choices() -> None:
    for value, expected in ((True, "on"), (False, "off"), ("store", "store")):
        read = flags.read(SIZES, options={"three_ways": {"way": value}})
        assert read.of["three_ways"].options == {"way": expected}


@pytest.mark.parametrize(
    ("asked", "choices"),
    [
        ({"loud": 2}, "off, on"),
        ({"size": 3}, "8, 4"),
        ({"size": True}, "8, 4"),
        ({"size": 4.0}, "8, 4"),
        ({"size": None}, "8, 4"),
    ],
)
def test_other_numbers_and_bools_are_errors(asked: dict[str, Any], choices: str) -> None:
    ((name, value),) = asked.items()
    expected = rf"four\({name}=...\) is {value!r}; the choices are: {choices}$"
    with pytest.raises(FlagError, match=expected):
        flags.read(SIZES, options={"four": asked})
