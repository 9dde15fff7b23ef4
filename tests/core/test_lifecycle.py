"""Every patch through every ordering of import, apply, unapply, apply again, second library.

It is applied by a call or by the start-up hook.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ds_patches
from tests.core import fake, orderings


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
    found = walked("all", orderings.SAMPLE, str(folder), path=(installation,))
    demand(found)
    assert len(found) == (4 + 3 * (20 - 4)) + (4 + 3 * (20 - 9)), "by a call, and by the hook"


@pytest.mark.parametrize("name", ["accumulation", "coalesce", "dc_fallback"])
def test_patches_in_telling_orderings(name: str) -> None:
    """The others' are in all of their orderings, below."""
    demand(walked("telling", name), "telling")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ds_patches.names())
def test_every_patch_in_every_ordering(name: str) -> None:
    demand(walked("all", name))
