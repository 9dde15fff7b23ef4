"""Every patch through every ordering of import, apply, unapply, apply again, second library.

It is applied by a call or by the start-up hook.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

import ds_patches
from tests.core import fake, orderings

REAL = ds_patches.names()


def walked(which: str, *arguments: str, path: tuple[Path, ...] = ()) -> dict[str, str]:
    """Walk one patch; returns the trouble of each ordering, "" for none.

    which: "all", or the "telling" ones.
    """
    done = fake.run("", *path, arguments=("-m", "tests.core.orderings", which, *arguments))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


def demand(found: dict[str, str], which: str = "all") -> None:
    trouble = {word: text for word, text in found.items() if text}
    first = next(iter(trouble.items()), ("", ""))
    assert not trouble, f"{len(trouble)} failed: {list(trouble)}; {first[0]}: {first[1]}"
    assert sorted(found) == sorted(orderings.WHICH[which]())


def test_the_sample_in_every_ordering(tmp_path: Path) -> None:
    folder = fake.patch_folder(tmp_path / "patches")
    installation = fake.deepspeed(tmp_path / "deepspeed")
    demand(walked("all", orderings.SAMPLE, str(folder), path=(installation,)))


@pytest.mark.parametrize("name", REAL)
def test_every_patch_in_telling_orderings(name: str) -> None:
    demand(walked("telling", name), "telling")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", REAL)
def test_every_patch_in_every_ordering(name: str) -> None:
    demand(walked("all", name))


def test_what_follows_upon_what_is_told_by_few() -> None:
    telling = orderings.telling()
    assert len(telling) < 25
    for pair in ("AU", "UR", "IA", "UI", "XU", "PR", "FA", "CA"):
        assert any(pair in word for word in telling), pair


def test_no_patch_and_no_ordering_is_missing() -> None:
    folders = Path(ds_patches.__file__).parent.glob("*/binding.py")
    assert sorted(REAL) == sorted(folder.parent.name for folder in folders)
    words = orderings.orderings()
    assert len(words) == len(set(words))
    for first, second in itertools.product("AH", ("", *"FCXP")):
        expected = {
            word
            for word in map("".join, itertools.permutations(f"I{first}UR{second}"))
            if [e for e in word if e in f"{first}UR"] == [first, *"UR"]
            and imported_before(second, word)
        }
        assert expected == {w for w in words if set(w) == set(f"I{first}UR{second}")}
    assert len(words) == (4 + 4 * (20 - 4)) + (4 + 4 * (20 - 9))


def imported_before(second: str, word: str) -> bool:
    """Whether a second library finds the targets imported; the hook alone imports nothing."""
    return not second or not word.startswith((second, f"H{second}", f"HU{second}"))
