"""Errors that another process raises again: a pool that cannot read one waits for good."""

from __future__ import annotations

import pickle

import pytest

import ds_patches
from ds_patches.core.errors import (
    AlreadyApplied,
    BrokenPatch,
    DsPatchesError,
    FlagError,
    OtherRankFailed,
    RanksDisagree,
    UnknownPatch,
)
from ds_patches.startup.site_packages import StartupError
from ds_patches.traincheck.report import NotChecked, NotTrained, TrainReport, Untrained

PLAIN = [AlreadyApplied, BrokenPatch, FlagError, OtherRankFailed, RanksDisagree]
PLAIN += [StartupError, NotChecked]
REPORT = TrainReport(1, 0, 2, (Untrained("head.weight", "Linear"),))
ERRORS = [kind("what was wrong") for kind in PLAIN]
ERRORS += [UnknownPatch("on", ["one", "two"], "apply"), NotTrained(REPORT)]
ERRORS += [ds_patches.PatchNotApplied([*ds_patches.status().values()])]


def test_every_error_is_here() -> None:
    def below(kind: type) -> set[type]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    ours = {kind for kind in below(DsPatchesError) if kind.__module__.startswith("ds_patches")}
    assert ours - {DsPatchesError} == set(map(type, ERRORS))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_through_a_pipe(error: DsPatchesError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
