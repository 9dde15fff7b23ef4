"""`python -m ds_patches doctor --train-check`: real trials, in processes of their own."""

from __future__ import annotations

import time

import pytest

from ds_patches.traincheck import doctor
from tests import shell

NAMES = "NOT TRAINED: seen.weight, seen.bias, skipped.weight, skipped.bias"


@pytest.mark.exhaustive
def test_the_command_says_what_was_checked_and_what_was_not() -> None:
    said = shell.doctor("--train-check", DS_PATCHES="zero3_retain")
    head, stock, patched, compiled = said[-4:]
    assert head == "train check: 4 parameters, ZeRO-3, one process on cpu"
    assert stock == "  eager, stock: all train"
    assert patched == "  eager, accumulation, zero3_retain live: all train"
    assert compiled.startswith("  DeepCompile: not checked, this DeepSpeed ")
    assert compiled.endswith("; the lines above are of eager ZeRO-3")


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["everywhere", "stock"])
def test_lost_gradients_are_named_and_decide(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(doctor, "_TRIAL", ("tests.traincheck.losing_trial", where))
    found = doctor.Diagnosis(shell.environment(), seconds=120)
    _, stock, patched, _ = found.lines()
    assert stock == f"  eager, stock: {NAMES}"
    assert patched.endswith(NAMES if where == "everywhere" else "live: all train")
    assert found.trains is (where == "stock")


@pytest.mark.exhaustive
def test_deepcompile_that_does_not_come_up_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TRIAL", ("tests.traincheck.losing_trial", "compiled"))
    found = doctor.Diagnosis(shell.environment(), seconds=120)
    *_, last = found.lines()
    assert last == (
        "  DeepCompile: not checked, engine.compile() has left it to torch.compile; "
        "the lines above are of eager ZeRO-3"
    )
    assert found.trains


def test_a_trial_that_hangs_is_ended() -> None:
    began = time.monotonic()
    found = doctor.Diagnosis(shell.environment(), seconds=0.2)
    lines = list(found.lines())
    assert lines[1] == "  eager, stock: did not run: not done after 0.2 s (--timeout)"
    assert lines[-1].startswith("  DeepCompile: not checked, the first trial said nothing of it")
    assert not found.trains
    assert time.monotonic() - began < 30


@pytest.mark.exhaustive
def test_a_trial_that_cannot_begin_says_why() -> None:
    found = doctor.Diagnosis(
        shell.environment(DS_PATCHES="nonsense", DS_ACCELERATOR="moon"), seconds=60
    )
    _, stock, patched, _ = found.lines()
    assert "did not run: " in stock
    assert "moon" in stock
    assert "did not run: UnknownPatch: " in patched
    assert not found.trains
