"""Each part on GPUs: a stream that is late makes the race a certainty, and it is lost in stock."""

import sys
from typing import Any

import pytest

from tests.gpu import delayed
from tests.stream_safety import on_streams
from tests.stream_safety.test_races import NO_TIMER, SHOWN, shows
from tests.world import World

LATE: dict[str, dict[str, Any]] = {
    "ping_pong": {"stage": 2, "late": "late_reductions"},
    "zero3_producer": {"stage": 3, "late": "late_backward", "aside": True},
    "zero3_gather": {"stage": 3, "late": "late_step", "settings": NO_TIMER},
    "record_stream": {"stage": 2, "late": "late_reductions", "reduce_bucket_size": 32},
    "all_reduced": {
        "stage": 1,
        "late": "late_reductions",
        "reduce_bucket_size": 32,
        "reduce_scatter": False,
    },
    "producer_streams": {"stage": 2, "late": "late_gradients"},
    "buffer_reuse": {"stage": 2, "late": "late_gradients_and_reductions"},
}


def unlike(gpus: World, what: str, **options: Any) -> bool:
    """Return True if any parameter differs, in any run, on any rank."""
    names: list[list[list[str]]] = gpus.within(300).run(delayed.against_no_overlap, **options)
    # To stderr, which pytest-xdist passes on at once with --capture=no.
    print(what, options, "unlike", names, file=sys.stderr)
    return any(any(runs) for runs in names)


@pytest.mark.parametrize("part", SHOWN)
def test_stock_is_wrong_where_it_lacks_the_fix(gpus: World, part: str) -> None:
    if not shows(part):
        pytest.skip("this release has the fix, or hides that it has not")
    assert unlike(gpus, part, **LATE[part])


@pytest.mark.parametrize("part", LATE)
def test_equal_to_no_overlap_to_the_bit(living_gpus: World, part: str) -> None:
    assert not unlike(living_gpus, part, patched=True, **LATE[part])


SCRIPTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro_steps": {"micro_steps": 3},
    "coalesce": {"script": on_streams.coalesced, "beside": ("coalesce",)},
    "zero3_retain": {"script": on_streams.retained, "beside": ("zero3_retain",)},
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("script", SCRIPTS)
def test_thirty_runs_are_one(living_gpus: World, script: str, stage: int) -> None:
    case = {"stage": stage, "times": 30, "patched": True, **SCRIPTS[script]}
    assert not unlike(living_gpus, script, **case)
