"""benchmarks.startup: a small run."""

from __future__ import annotations

import pytest

from tests.benchmarks.outcome import Outcome, outcome_of

HOOKED = {
    "PYTHONPATH, DS_PATCHES unset": "< 2",
    "PYTHONPATH, DS_PATCHES=all": "< 10",
    ".pth, DS_PATCHES unset": "< 2",
    ".pth, DS_PATCHES=all": "< 10",
}
CALLS = ["apply_all", "unapply_all", "apply_all"]


@pytest.fixture(scope="module")
def startup(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    command = "-m benchmarks.startup --rounds 3 --imports 1 --commit abc --json"
    return outcome_of(command, tmp_path_factory.mktemp("startup") / "startup.json")


@pytest.mark.exhaustive
def test_startup_prints_every_start_and_bar(startup: Outcome) -> None:
    bare = startup.table("python -c pass")
    assert [cells[0] for cells in bare] == ["no hook", *HOOKED]
    assert all(float(number) > 0 for cells in bare for number in cells[1:3])
    assert [cells[3] == "-" for cells in bare] == [True, False, False, False, False]
    bars = startup.table("added CPU ms")
    assert [(cells[0], cells[2]) for cells in bars] == list(HOOKED.items())
    imports = startup.table("python -c 'import deepspeed'")
    assert [cells[0] for cells in imports][:2] == ["DS_PATCHES unset", "DS_PATCHES=all"]
    assert float(imports[0][1]) > 10 * float(bare[0][1]), "DeepSpeed was imported"
    calls = startup.table("import deepspeed, then")
    assert [cells[0].partition("()")[0] for cells in calls] == CALLS
    assert [cells[5] for cells in calls] == ["< 350", "-", "< 150"]
    assert all(float(cells[column]) > 0 for cells in calls for column in (1, 3))


@pytest.mark.exhaustive
def test_startup_keeps_what_it_measured(startup: Outcome) -> None:
    assert startup.kept["provenance"]["commit"] == "abc"
    starts = startup.kept["starts"]
    assert [len(start["taken"]) for start in starts] == [3] * 5 + [1] * 3
    assert all(taken["cpu"] > 0 for start in starts for taken in start["taken"])
    calls = startup.kept["calls"]
    assert [len(taken) for taken in calls.values()] == [1] * 3
    first, _, second = (taken[0]["cpu"] for taken in calls.values())
    assert first > second, "the shapes are known, and nothing is imported"
