"""`python -m ds_patches doctor --streams`: real trials, in processes of their own."""

from __future__ import annotations

import time

import pytest
import torch

from ds_patches import __main__
from ds_patches.streamcheck import doctor, trial
from tests import shell

HEAD = f"streams: 4 stages on a CPU, torch {torch.__version__}"
WHERE = "the gradient of layer 7's weight in batch 1, by 0.25 in 1 of "
HOW = "with a stream per stage and without"
ENDS = "  did not run to its end: "


def said(monkeypatch: pytest.MonkeyPatch, what: str, seconds: float = 120) -> tuple[list[str], int]:
    """What the command prints last, and its exit status."""
    words = ("tests.streamcheck.cpu_trial", what, "--runs", "4")
    monkeypatch.setattr(doctor, "_TRIAL", words)
    found = doctor.Diagnosis(shell.environment(), seconds)
    return [*found.lines()], int(not found.equal)


def test_without_a_gpu_nothing_is_checked() -> None:
    *_, blank, last = shell.doctor("--streams", CUDA_VISIBLE_DEVICES="")
    here = f"torch {torch.__version__} sees no CUDA GPU"
    assert (blank, last) == ("", f"streams: not checked, {here}, and a CPU has no streams")


@pytest.mark.exhaustive
def test_equal_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"  equal to the bit {HOW}: 4 of 4 runs"
    assert said(monkeypatch, "equal") == ([HEAD, line], 0)


def test_the_first_difference_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    (head, verdict, where), status = said(monkeypatch, "differs")
    assert head == HEAD
    assert verdict == f"  NOT EQUAL to the bit {HOW}: only 2 of 4 runs"
    assert where.startswith(f"  the first difference is in run 2: {WHERE}")
    assert status == 1


@pytest.mark.exhaustive
def test_streams_are_not_blamed_for_what_differs_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (head, verdict), status = said(monkeypatch, "unsteady")
    assert head == HEAD
    assert verdict.startswith(f"  NOT EQUAL already without streams, in two runs: {WHERE}")
    assert status == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("crashes", "exit code -11, "),
        ("raises", "RuntimeError: CUDA error: unspecified launch failure"),
    ],
)
def test_a_trial_that_ends_early_says_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch, what: str, why: str
) -> None:
    (head, verdict, error), status = said(monkeypatch, what)
    assert head == HEAD
    assert verdict == f"  equal to the bit {HOW}: 1 of 1 runs so far"
    assert error.startswith(ENDS + why)
    assert status == 1


@pytest.mark.exhaustive
def test_a_trial_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    lines, status = said(monkeypatch, "hangs", seconds=8)
    assert time.monotonic() - began < 30
    assert lines[-1] == f"{ENDS}not done after 8 s (--timeout)"
    assert status == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(("what", "status"), [("equal", 0), ("differs", 1)])
def test_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str, status: int
) -> None:
    monkeypatch.setattr(doctor, "_TRIAL", ("tests.streamcheck.cpu_trial", what, "--runs", "2"))
    monkeypatch.setenv("PYTHONPATH", shell.environment()["PYTHONPATH"])
    assert __main__.main(["doctor", "--streams"]) == status
    assert f"\n\n{HEAD}\n" in capsys.readouterr().out


def test_streams_that_cannot_overlap_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert not trial._why_not()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert trial._why_not().startswith("CUDA_LAUNCH_BLOCKING is set")


@pytest.mark.parametrize(
    ("gpus", "places"),
    [(1, [0, 0, 0, 0]), (2, [0, 0, 1, 1]), (3, [0, 0, 1, 2]), (4, [0, 0, 1, 2, 3])],
)
def test_stages_are_spread_over_the_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, places: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert [device.index for device in trial._places()] == places
