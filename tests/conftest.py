"""Fixtures and the pytest header of the CPU suite."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.quick import sampling
from tests.world import World
from tools.releases import this_turn

# Tests that import DeepSpeed in pytest's own process mean the CPU one, also beside a GPU.
os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--turn-of",
        type=int,
        metavar="N",
        help="of the exhaustive tests alone, those whose turn it is at this commit, of N turns",
    )


def pytest_configure(config: pytest.Config) -> None:
    wanted = os.environ.get("DEEPSPEED_TEST_RELEASE")
    first = importlib.metadata.version("deepspeed")
    if wanted and wanted != first:
        raise pytest.UsageError(f"DeepSpeed {wanted} was asked for, {first} is first on the path")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before ``-m`` selects: say of each case of a parametrised test where it belongs."""
    for item in items:
        _leave_out_of_the_core(item)
    sampling.mark(items)
    if turns := config.getoption("--turn-of"):
        _keep_one_turn(config, items, turns)


def _keep_one_turn(config: pytest.Config, items: list[pytest.Item], turns: int) -> None:
    """Keep every Nth of the exhaustive ones: neighbours, which are alike, go apart."""
    exhaustive = [item for item in items if item.get_closest_marker("exhaustive")]
    chosen = exhaustive[this_turn(turns) :: turns]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _leave_out_of_the_core(item: pytest.Item) -> None:
    """Take the marker off a case that its values leave out."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    item.own_markers[:] = [
        mark
        for mark in item.own_markers
        if mark.name != "core_case"
        or all(params.get(name) == value for name, value in mark.kwargs.items())
    ]


def pytest_report_header(config: pytest.Config) -> list[str]:
    spec = importlib.util.find_spec("deepspeed")
    version = importlib.metadata.version("deepspeed")
    turns = config.getoption("--turn-of")
    lines = [f"exhaustive: turn {this_turn(turns)} of {turns}"] if turns else []
    return [f"deepspeed: {version} ({spec.origin})", *lines]


def living(scope: Any, ranks: int = 2) -> Any:
    """A fixture: ranks that live as long as its scope; see tests/world."""

    @pytest.fixture(scope=scope)
    def start() -> Iterator[World]:
        with World(ranks) as started:
            yield started

    return start


world = living("session")
fresh_world = living("function")  # for stock behaviour, before anything was applied
three = living("module", 3)  # no power of two to divide by, partitions that end in odd places
four = living("module", 4)
