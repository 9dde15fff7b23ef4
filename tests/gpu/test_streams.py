"""`doctor --streams` on GPUs: it holds, and it finds out what is not handed over."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from ds_patches.streamcheck import doctor, lanes, trial
from ds_patches.streamcheck.training import Training
from tests.shell import environment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

HOW = "with a stream per stage and without"
SECONDS = 300.0


@pytest.fixture(params=["one GPU", "all GPUs"])
def variables(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a user, who may have one GPU only."""
    if request.param == "one GPU":
        return environment(
            CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        )
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return environment()


def checked(variables: dict[str, str]) -> tuple[list[str], bool]:
    found = doctor.Diagnosis(variables, SECONDS)
    lines = [*found.lines()]
    # To stderr, which pytest-xdist passes on at once with --capture=no.
    print(*lines, sep="\n", file=sys.stderr)
    return lines, found.equal


def test_streams_change_nothing(variables: dict[str, str]) -> None:
    lines, equal = checked(variables)
    assert lines[1:] == [f"  equal to the bit {HOW}: 30 of 30 runs"]
    assert equal


@pytest.mark.parametrize("fault", lanes.FAULTS)
def test_what_is_not_handed_over_is_found(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], fault: str
) -> None:
    words = ("ds_patches.streamcheck.trial", "--fault", fault, "--runs", "3")
    monkeypatch.setattr(doctor, "_TRIAL", words)
    lines, equal = checked(variables)
    assert lines[1] == f"  NOT EQUAL to the bit {HOW}: only 0 of 3 runs"
    assert lines[2].startswith("  the first difference is in run 1: ")
    assert not equal


def test_no_run_waits_for_a_gpu() -> None:
    devices = trial._places()
    training, streamed = Training(trial.WORK, devices), lanes.streamed(devices)
    training.run(streamed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.run(streamed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
