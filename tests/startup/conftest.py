"""Fixtures of the start-up tests."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.startup.environment import Environment


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment that no test changes."""
    return Environment.make(tmp_path_factory.mktemp("environment") / "shared")


@pytest.fixture
def own(environment: Environment, tmp_path: Path) -> Environment:
    return environment.copy(tmp_path / "own")


@pytest.fixture(scope="session")
def enabled(environment: Environment) -> Environment:
    """One whose `.pth` hook is enabled, and that no test changes."""
    copied = environment.copy(environment.root.with_name("enabled"))
    assert copied.ds_patches("enable").returncode == 0
    return copied


@pytest.fixture(params=["PYTHONPATH", ".pth"])
def hooked(
    request: pytest.FixtureRequest, environment: Environment, enabled: Environment
) -> Callable[..., str]:
    """Runs an interpreter that has a start-up hook, either one; returns what it printed."""
    if request.param == ".pth":
        return enabled.prints
    return partial(environment.prints, path=(environment.hook,))
