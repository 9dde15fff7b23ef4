"""Fixtures and the pytest header of the CPU suite."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator

import pytest

from tests.world import World

# Tests that import DeepSpeed in pytest's own process mean the CPU one, also beside a GPU.
os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "core_case(**values): belongs to the subset that runs on every chosen DeepSpeed release; "
        "of a parametrised test, the cases with these values do",
    )
    config.addinivalue_line(
        "markers", "exhaustive: belongs to `make test-all`, and is left out of `make test`"
    )
    wanted = os.environ.get("DEEPSPEED_TEST_RELEASE")
    if wanted and wanted != importlib.metadata.version("deepspeed"):
        found = importlib.metadata.version("deepspeed")
        raise pytest.UsageError(f"DeepSpeed {wanted} was asked for, {found} is first on the path")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before ``-m`` selects: take the marker off cases that its values leave out."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        item.own_markers[:] = [
            mark
            for mark in item.own_markers
            if mark.name != "core_case"
            or all(params.get(name) == value for name, value in mark.kwargs.items())
        ]


def pytest_report_header() -> str:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None:
        return "deepspeed: not installed"
    return f"deepspeed: {importlib.metadata.version('deepspeed')} ({spec.origin})"


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Two gloo ranks that live as long as the session; see tests/world."""
    with World() as living:
        yield living


@pytest.fixture
def fresh_world() -> Iterator[World]:
    """Two ranks for this test alone: for stock behaviour, before anything was applied."""
    with World() as own:
        yield own
