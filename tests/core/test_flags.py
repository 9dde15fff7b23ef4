"""Flags: their order, and that nothing unknown passes in silence."""

import os
from typing import Any

import pytest

from ds_patches.core import flags
from ds_patches.core.errors import FlagError
from ds_patches.core.patch import Patch

PATCHES = {name: Patch(name, "", ">=0.16", ()) for name in ("one", "two_words")}
PATCHES["rare"] = Patch("rare", "", ">=0.16", (), by_default=False)
BOTH = ("one", "two_words")
#: Variables without their prefix, DS_PATCHES.
Env, Call = dict[str, str], dict[str, Any]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("DS_PATCHES")]:
        monkeypatch.delenv(name)


def read(monkeypatch: pytest.MonkeyPatch, env: Env, **call: Any) -> flags.Requests:
    for name, value in env.items():
        monkeypatch.setenv(f"DS_PATCHES{name}", value)
    return flags.read(PATCHES, **call)


@pytest.mark.parametrize(
    ("env", "call", "wanted"),
    [
        ({}, {}, BOTH),
        ({"": "all"}, {}, BOTH),
        ({"": "none"}, {}, ()),
        ({"": "one"}, {}, ("one",)),
        ({"": " one , two_words "}, {}, BOTH),
        ({"_SKIP": "one"}, {}, ("two_words",)),
        # the call beats everything
        ({"": "none"}, {"only": ["one"]}, ("one",)),
        ({"_SKIP": "one"}, {"only": ["one"]}, ("one",)),
        ({}, {"only": []}, ()),
        ({}, {"skip": "two_words+one"}, ()),
        ({"": "all"}, {"skip": ["one"]}, ("two_words",)),
        # what is not by default is named
        ({"": "all,rare"}, {}, (*BOTH, "rare")),
        ({"": "rare"}, {}, ("rare",)),
        ({}, {"only": "rare"}, ("rare",)),
    ],
)
def test_order(
    monkeypatch: pytest.MonkeyPatch, env: Env, call: Call, wanted: tuple[str, ...]
) -> None:
    requests = read(monkeypatch, env, **call)
    assert tuple(requests.wanted) == wanted
    assert env or call or requests.by_name["rare"].why == "not on by default: DS_PATCHES=all,rare"


def test_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not flags.read(PATCHES).strict
    assert read(monkeypatch, {"_STRICT": "1"}).strict
    assert not flags.read(PATCHES, strict=False).strict


@pytest.mark.parametrize(
    ("env", "call"), [({}, {"force": "one"}), ({"_FORCE": "one"}, {}), ({"_FORCE": "one+"}, {})]
)
def test_what_is_named_is_forced(monkeypatch: pytest.MonkeyPatch, env: Env, call: Call) -> None:
    requests = read(monkeypatch, env, **call)
    assert [name for name, request in requests.by_name.items() if request.force] == ["one"]


NAMES = "no patch is named .*one, two_words"


@pytest.mark.parametrize(
    ("env", "call", "message"),
    [
        ({"": "one,thre"}, {}, NAMES),
        ({"_SKIP": "thre"}, {}, NAMES),
        ({"_SKIP": "all"}, {}, NAMES),
        ({"": ","}, {}, NAMES),
        *(({"_FORCE": name}, {}, NAMES) for name in ("thre", "all")),
        *(({"": switch}, {}, "mean 'all'") for switch in ("1", "True", "on")),
        *(({"": switch}, {}, "mean 'none'") for switch in ("0", "off")),
        *(({}, {argument: "one,thre"}, NAMES) for argument in ("only", "skip", "force")),
        ({}, {"only": ""}, NAMES),
        ({}, {"only": True}, "True is not a list of patches' names"),
        ({"": "one,none"}, {}, "`none` without other words"),
        ({"_FIVE": "1"}, {}, "DS_PATCHES_STRICT"),
        ({"_TWO_WORDS": "0"}, {}, "DS_PATCHES_SKIP=two_words"),
        ({"_STRICT": "very"}, {}, "0, 1"),
        ({"_LOG": "loud"}, {}, "debug, info, warning"),
        ({"_STRIKT": "1"}, {}, "mean 'DS_PATCHES_STRICT'"),
    ],
)
def test_what_means_nothing_is_an_error_that_lists_what_does(
    monkeypatch: pytest.MonkeyPatch, env: Env, call: Call, message: str
) -> None:
    with pytest.raises(FlagError, match=message):
        read(monkeypatch, env, **call)


def test_what_is_almost_one_of_ours_gets_a_hint() -> None:
    env = dict.fromkeys(("DS_PATCHS", "DS_PATCH_SKIP", "DS_PATCH", "DS_PATCH_SIZE", "PATH"), "1")
    hints = flags.misspelt(env)
    assert [hint.split()[0] for hint in hints] == ["DS_PATCHS", "DS_PATCH_SKIP", "DS_PATCH"]
    assert hints[0].endswith("; did you mean DS_PATCHES?")


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    unset = flags.read(PATCHES)
    names = [name.removeprefix("DS_PATCHES") for name in flags.VARIABLES]
    for blank in ("", " \t"):
        assert read(monkeypatch, dict.fromkeys((*names, "_OF_NOBODY"), blank)) == unset
    assert not flags.is_strict()
