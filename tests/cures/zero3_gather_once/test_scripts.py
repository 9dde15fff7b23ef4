"""Ordinary scripts, with all patches and this one, which is not among them by default."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import EAGER, World
from tests.scripts import law
from tests.scripts.declared import RIGHT, Script, scripts
from tests.scripts.worlds import PATCHED, prepare, train


@pytest.fixture(scope="module")
def gathering() -> Iterator[World]:
    with World(variables={"DS_PATCHES": "all,zero3_gather_once"}, seconds=90.0) as ranks:
        yield ranks


def at_stage_3() -> Iterator[Any]:
    for script in scripts():
        if 3 in script.stock and script.on == EAGER:
            yield pytest.param(script, id=script.name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", [*at_stage_3()])
def test_a_script_ends_where_plain_pytorch_does(
    gathering: World, script: Script, tmp_path: Path
) -> None:
    """Or is refused as with the other patches."""
    options, folder = script.at(3), str(tmp_path)
    if script.before is not None:
        gathering.run(prepare, script, options, PATCHED, folder)
    outcomes = gathering.run(train, script, options, PATCHED, folder, False)
    verdict = law.verdict(outcomes)
    is_refused = script.refusal and re.search(script.refusal, verdict)
    assert verdict == RIGHT or is_refused, verdict
