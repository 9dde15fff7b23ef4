"""Errors that another process raises again: a pool that cannot read one waits for good."""

import pickle

import ds_patches
from ds_patches.core.errors import DsPatchesError, UnknownPatch
from ds_patches.diagnostics.traincheck.report import NotTrained, TrainReport, Untrained
from ds_patches.startup import command

#: Those that are made of something else than their message.
MADE = [
    UnknownPatch("on", ["one", "two"], "apply"),
    NotTrained(TrainReport(1, 0, 2, (Untrained("head.weight", "Linear"),))),
    ds_patches.PatchNotApplied([*ds_patches.status().values()]),
]


def test_every_error_comes_through_a_pipe() -> None:
    def below(kind: type) -> set[type]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    kinds = below(DsPatchesError) - {DsPatchesError, *map(type, MADE)}
    ours = [kind for kind in kinds if kind.__module__.startswith("ds_patches")]
    assert command.StartupError in ours
    for error in (*MADE, *(kind("what was wrong") for kind in ours)):
        unpickled = pickle.loads(pickle.dumps(error))
        assert type(unpickled) is type(error)
        assert str(unpickled) == str(error)
        assert vars(unpickled) == vars(error)
