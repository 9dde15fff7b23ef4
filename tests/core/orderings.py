"""Walk one patch through every ordering of what can happen to it, each in its own process.

    python -m tests.core.orderings all|telling PATCH [FOLDER OF PATCHES]

An ordering is a word of these letters, one for each event:

    I import the targets   A apply   H apply by the start-up hook, in the place of A
    U unapply   R apply again
    F C P  a second library wraps every target, by functools.wraps or by a bare closure, or it puts
           a plain function in its place

The walk forks before every event, so that each ordering has a fresh interpreter's history of
exactly its own events, while DeepSpeed is imported once per way of importing it. After every
event the live objects and the status are compared with what a model of the ordering expects; at
the end all is taken back and the originals must be there, by identity. Prints a JSON line each.

The hook applies at once where DeepSpeed is imported, and else waits: it is then the import that
applies, or nothing if the patch was taken back before.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any

import pytest

import ds_patches
from ds_patches import startup
from ds_patches.core import gate, lifecycle, live, registry, release, watch
from ds_patches.core.patch import Target
from ds_patches.core.state import PatchStatus, State, WrapperState
from tests.core import fake
from tests.core.model import Model
from tests.quick.sampling import cover

SECOND = "FCP"
#: Second libraries whose wrapper does not say what it wraps: the gate refuses beneath them.
OPAQUE = "CP"
#: The patch of which the walk may also call the targets.
SAMPLE = "sample"

#: A way to have the patch applied; the status it led to.
Way = Callable[[], PatchStatus]


def orderings() -> list[str]:
    """Return every ordering: apply, unapply, apply again in this order, the others anywhere."""
    words = []
    for first, second in itertools.product("AH", ("", *SECOND)):
        for events in itertools.permutations(f"I{first}UR{second}"):
            word = "".join(events)
            in_order = word.index(first) < word.index("U") < word.index("R")
            # A second library imports what it wraps, so before it the targets are imported: by
            # whoever else imports them, and the hook does not.
            before, _, _ = word.partition(second) if second else ("I", "", "")
            if in_order and set(before) & set("IAR"):
                words.append(word)
    return words


def telling() -> list[str]:
    """Return few orderings that show whatever may follow upon whatever, begin, and end.

    Without the hook, whose waiting takes one import of DeepSpeed more for each way to end it.
    """
    words = [word for word in orderings() if "H" not in word]
    return [words[at] for at in cover([tuple(itertools.pairwise(f"^{word}$")) for word in words])]


WHICH = {"all": orderings, "telling": telling}


class Walk:
    """One patch, the events so far, and what they should have led to."""

    def __init__(self, name: str) -> None:
        installed = release.installed()
        self.name = name
        self.targets = gate.targets(registry.patch(name), installed.version)
        self.originals: dict[str, Any] = {}
        self.models: dict[str, Model] = {}
        self.second: dict[str, Any] = {}
        self.beneath_second: dict[str, Any] = {}
        self.style = ""
        self.resting = {State.READY}
        self.waits = False

    def step(self, event: str) -> None:
        """Let one event happen, then compare the live objects with the model."""
        if event == "I":
            self._import()
        elif event == "U":
            self._unapply()
        elif event in SECOND:
            self._wrap(event)
        elif event == "H" and not self.originals:
            self._arm()
            self.resting, self.waits = {State.PENDING}, True
        elif self.style and self.style in OPAQUE:
            self._apply_in_vain(self._arm if event == "H" else self._call_in_vain)
            for model in self.models.values() if event == "H" else ():
                model.refuse()
        else:
            self._apply(self._arm if event == "H" else self._call)
        self.compare()

    def compare(self) -> None:
        """Demand that status and live objects are what the model says."""
        status = ds_patches.status()[self.name]
        on = {key: model.state for key, model in self.models.items() if model.on}
        assert status.targets == on, (status, on)
        on_top = all(state is WrapperState.ON_TOP for state in on.values())
        expected = {State.APPLIED if on_top else State.SHADOWED} if on else self.resting
        assert status.state in expected, (status, expected)
        live_now = bool(on) and WrapperState.REPLACED not in on.values()
        assert status.live is live_now is ds_patches.is_applied(self.name)
        for target in self.targets:
            if self.models:
                self._compare_raw(target, self.models[target.key])
            else:
                assert target.module not in sys.modules, "the hook imports nothing"

    def finish(self) -> None:
        """Take all back, the second library too, and demand the originals."""
        ds_patches.unapply(self.name)
        for target in self.targets:
            if target.key in self.second:
                _put(target, self.beneath_second[target.key])
        ds_patches.unapply(self.name)
        for target in self.targets:
            assert _raw(target) is self.originals[target.key], target.key
        assert not ds_patches.is_applied(self.name)

    def _import(self) -> None:
        if self.waits:
            self._apply(self._import_targets)
        else:
            self._import_targets()
            self._take_originals({t.key: _raw(t) for t in self.targets})

    def _import_targets(self) -> PatchStatus:
        for target in self.targets:
            import_module(target.module)
        return ds_patches.status()[self.name]

    def _call(self) -> PatchStatus:
        return ds_patches.apply(self.name)

    def _call_in_vain(self) -> PatchStatus:
        with pytest.raises(ds_patches.PatchNotApplied) as refusal:
            ds_patches.apply(self.name)
        return refusal.value.statuses[0]

    def _arm(self) -> PatchStatus:
        os.environ["DS_PATCHES"] = self.name
        startup.arm()
        return ds_patches.status()[self.name]

    def _apply(self, way: Way) -> None:
        self.waits = False
        status = way()
        if not self.originals:  # the patch imported the targets itself, nobody came before it
            wrappers = lifecycle.lives[self.name].journal.wrappers
            self._take_originals({w.target.key: w.original for w in wrappers})
        for model in self.models.values():
            model.apply()
        raws = [_raw(target) for target in self.targets]
        assert ds_patches.apply(self.name) == status
        assert all(_raw(t) is raw for t, raw in zip(self.targets, raws, strict=True))
        self.resting = {State.REVERTED}

    def _apply_in_vain(self, way: Way) -> None:
        assert way().state is State.SHAPE_CHANGED
        self.resting = {State.SHAPE_CHANGED}

    def _unapply(self) -> None:
        if self.waits:
            self.resting, self.waits = {State.REVERTED}, False
        for model in self.models.values():
            model.unapply()
        status = ds_patches.unapply(self.name)
        assert ds_patches.unapply(self.name) == status

    def _wrap(self, style: str) -> None:
        self.style = style
        for target in self.targets:
            self.models[target.key].wrap(style)
            raw = _raw(target)
            if raw is not live.MISSING:
                self.beneath_second[target.key] = raw
                self.second[target.key] = _STYLES[style](raw)
                _put(target, self.second[target.key])
        if State.READY in self.resting and style in OPAQUE:
            self.resting = {State.SHAPE_CHANGED}

    def _take_originals(self, raws: dict[str, Any]) -> None:
        if not self.originals:
            self.originals = raws
            watched = {target.key for target in watch._TARGETS}
            self.models = {
                key: Model(raw is not live.MISSING, key in watched) for key, raw in raws.items()
            }

    def _compare_raw(self, target: Target, model: Model) -> None:
        raw = _raw(target)
        if not model.layers:
            assert raw is self.originals[target.key], target.key
        elif model.layers[-1] == "second":
            assert raw is self.second[target.key], target.key
        else:
            assert raw is not self.originals[target.key], target.key
            assert raw is not self.second.get(target.key), target.key
        if self.name == SAMPLE and model.layers:
            expected = model.on and "ours" in model.layers
            assert fake.is_marked(target.qualname) is expected, (target.key, model.layers)


def _raw(target: Target) -> Any:
    where = live.site(target)
    assert where is not None
    return live.raw(*where)


def _put(target: Target, value: Any) -> None:
    where = live.site(target)
    assert where is not None
    setattr(*where, value)


def _bare(raw: Any) -> Any:
    return lambda *args, **kwargs: raw(*args, **kwargs)


_STYLES: dict[str, Callable[[Any], Any]] = {
    "F": lambda raw: wraps(raw)(_bare(raw)),
    "C": _bare,
    "P": lambda raw: lambda *args, **kwargs: ("second",),
}


def walk_all(walk: Walk, done: str, words: list[str]) -> None:
    """Walk the tree of all words that start with `done`, depth first, forking at every branch."""
    if done in words:
        _in_a_child(done, walk.finish, lambda: _report(done, ""))
    for event in sorted({word[len(done)] for word in words if word != done}):
        path = done + event
        beneath = [word for word in words if word.startswith(path)]
        _in_a_child(path, partial(walk.step, event), partial(walk_all, walk, path, beneath))


def _in_a_child(path: str, *steps: Callable[[], None]) -> None:
    if child := os.fork():
        os.waitpid(child, 0)
        return
    try:
        for step in steps:
            step()
    except BaseException:
        _report(path, traceback.format_exc())
    os._exit(0)


def _report(word: str, trouble: str) -> None:
    print(json.dumps([word, trouble]), flush=True)


if __name__ == "__main__":
    which, name, *folders = sys.argv[1:]
    gc.disable()  # in a child it would copy most of what the fork shares
    import_module("wrapt" if folders else "torch")  # once, not in each child that needs it
    ds_patches.__path__.extend(folders)
    walk_all(Walk(name), "", WHICH[which]())
