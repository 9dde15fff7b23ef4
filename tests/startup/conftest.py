"""Fixtures of the start-up tests."""

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
def installed(environment: Environment) -> Environment:
    """One that has the hook in site-packages, as a wheel brings it, and that no test changes."""
    return environment.copy(environment.root.with_name("installed")).install()


@pytest.fixture(params=["PYTHONPATH", ".pth"])
def hooked(
    request: pytest.FixtureRequest, environment: Environment, installed: Environment
) -> tuple[Environment, tuple[Path, ...]]:
    """An environment and a path on which its interpreters have a start-up hook, of either kind."""
    return (installed, ()) if request.param == ".pth" else (environment, (environment.hook,))
