"""Ranks for DeepCompile alone: it changes Dynamo for the rest of the process."""

from collections.abc import Iterator

import pytest

from ds_patches.core import release
from ds_patches.dc_fallback.binding import PATCH
from tests.world import World


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    if not release.covers(PATCH.supported, release.installed().version):
        pytest.skip(f"dc_fallback is for DeepSpeed {PATCH.supported}")
    with World() as living:
        yield living
