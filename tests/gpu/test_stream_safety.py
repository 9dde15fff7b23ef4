"""Each part on GPUs: a stream that is late makes the race a certainty, and it is lost in stock."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.gpu import delayed
from tests.stream_safety import on_streams
from tests.stream_safety.test_races import NO_TIMER, SHOWN, lives, shows
from tests.world import World

SECONDS = 300.0

LATE: dict[str, dict[str, Any]] = {
    "ping_pong": {"stage": 2, "late": "late_reductions"},
    "zero3_producer": {"stage": 3, "late": "late_backward", "aside": True},
    "zero3_gather": {"stage": 3, "late": "late_step", "settings": NO_TIMER},
    "record_stream": {"stage": 2, "late": "late_reductions", "reduce_bucket_size": 32},
    "producer_streams": {"stage": 2, "late": "late_gradients"},
    "buffer_reuse": {"stage": 2, "late": "late_gradients_and_reductions"},
    "micro_steps": {"stage": 2, "late": "late_gradients_and_reductions", "micro_steps": 3},
}


#: What nobody has to wait for, and stock does.
WAITS = {
    "bucket_ready": delayed.reduces_before_the_next_gradient,
    "host_wait": delayed.host_is_ahead,
    "micro_steps": delayed.forward_is_ahead,
}


def unlike(gpus: World, parts: str, part: str) -> list[list[str]]:
    given = dict(LATE[part])
    found: list[list[str]] = gpus.within(SECONDS).run(
        delayed.against_no_overlap, given.pop("stage"), parts, **given
    )
    # To stderr, which pytest-xdist passes on at once with --capture=no.
    print(part, parts or "stock", "unlike", found, file=sys.stderr)
    return found


@pytest.mark.parametrize("part", SHOWN)
def test_stock_is_wrong_where_it_lacks_the_fix(gpus: World, part: str) -> None:
    if not shows(part):
        pytest.skip("this release has the fix, or hides that it has not")
    assert any(unlike(gpus, "", part))


@pytest.mark.parametrize("part", LATE)
def test_equal_to_no_overlap_to_the_bit(living_gpus: World, part: str) -> None:
    assert not any(unlike(living_gpus, "all", part))


@pytest.mark.parametrize("part", WAITS)
def test_nobody_waits_for_more(living_gpus: World, part: str) -> None:
    if not lives(part):
        pytest.skip("older releases let gradients be read between micro steps")
    run = living_gpus.within(SECONDS).run
    found = [run(WAITS[part], 2, parts) for parts in ("", part, "all")]
    print(part, "goes on", found, file=sys.stderr)
    assert found == [[False, False], [True, True], [True, True]]


SCRIPTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro_steps": {"micro_steps": 3},
    "coalesce": {"script": on_streams.coalesced, "beside": ("coalesce",)},
    "zero3_retain": {"script": on_streams.retained, "beside": ("zero3_retain",)},
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("script", SCRIPTS)
def test_thirty_runs_are_one(living_gpus: World, script: str, stage: int) -> None:
    """To the bit."""
    found = living_gpus.within(SECONDS).run(delayed.repeated, stage, 30, **SCRIPTS[script])
    print(script, stage, "unlike", [sum(map(bool, one)) for one in found], file=sys.stderr)
    assert not any(any(runs) for runs in found)
