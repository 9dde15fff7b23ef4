"""Every patch through every ordering of what can happen to it, each in its own process.

    python -m tests.core.test_lifecycle every|alone PATCH [FOLDER OF PATCHES]

An ordering is a word of these letters, one for each event:

    I import the targets   A apply, or H by the start-up hook   U unapply   R apply again
    F C P  a second library wraps every target, by functools.wraps or by a bare closure, or it puts
           a plain function in its place

The walk forks before every event: each ordering has a fresh interpreter's history of its own events
alone. After every event the live objects and the status are compared with what a model of the
ordering expects; at the end all is taken back and the originals must be there, by identity.

The hook applies at once where DeepSpeed is imported, and else waits: the import applies then, or
nothing if the patch was taken back before.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import ds_patches
from ds_patches import startup
from ds_patches.core import agreement, gate, lifecycle, live, registry, release
from ds_patches.core.patch import Target
from ds_patches.core.state import State, WrapperState
from tests.core import fake

SECOND = "FCP"
#: Those whose wrapper does not say what it wraps: the gate refuses beneath them.
OPAQUE = "CP"


def every() -> list[str]:
    """Return every ordering: apply, unapply, apply again in this order, the others anywhere."""
    words = []
    for first, second in itertools.product("AH", ("", *SECOND)):
        for word in map("".join, itertools.permutations(f"I{first}UR{second}")):
            # A second library imports what it wraps, so before it the targets are imported: by
            # whoever else imports them, and the hook does not.
            before = word.partition(second)[0] if second else "I"
            if word.index(first) < word.index("U") < word.index("R") and {*before} & {*"IAR"}:
                words.append(word)
    return words


def alone() -> list[str]:
    """Return those without a second library."""
    return [word for word in every() if not {*word} & {*SECOND}]


class Model:
    """What lies over one target's original, bottom first: "ours", the core's "watch", "second".

    watched: the core wraps the same function while any patch is applied.
    """

    def __init__(self, exists: bool, watched: bool) -> None:
        self.exists, self.on = exists, False
        self.watch = ["watch"] * watched
        self.layers: list[str] = []

    def put(self, *parts: str) -> None:
        self.on = self.on or "ours" in parts
        self.layers += [part for part in parts if part not in self.layers]

    def unapply(self) -> None:
        for part in ("ours", *self.watch) if self.on else {"watch"} & {*self.layers}:
            if part in self.layers and self.above(part)[:1] in ([], ["watch"]):
                self.layers.remove(part)
        self.on = False

    def wrap(self, style: str) -> None:
        if self.exists or self.layers:
            self.layers = [*(self.layers if style != "P" else []), "second"]

    @property
    def state(self) -> WrapperState:
        if "ours" not in self.layers:
            return WrapperState.REPLACED
        return WrapperState.WRAPPED_OVER if "second" in self.above("ours") else WrapperState.ON_TOP

    def above(self, part: str) -> list[str]:
        return self.layers[self.layers.index(part) + 1 :]


class Walk:
    """One patch, the events so far, and what they should have led to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.targets = gate.targets(registry.patch(name), release.installed().version)
        self.originals: dict[str, Any] = {}
        self.models: dict[str, Model] = {}
        self.second: dict[str, tuple[Any, Any]] = {}  # and what lies beneath
        self.style = ""
        self.resting, self.waits = {State.READY}, False
        self.activations: list[str] = []

    def step(self, event: str) -> None:
        """Let one event happen, then compare the live objects with the model."""
        if event == "U":
            self._unapply()
        elif event in SECOND:
            self._wrap(event)
        elif event == "I" and not self.waits:
            self._call(event)
            self._take_originals({t.key: _raw(t) for t in self.targets})
        elif event == "H" and not self.originals:
            self._call(event)
            self.resting, self.waits = {State.PENDING}, True
        elif self.style and self.style in OPAQUE:
            self._apply_in_vain(event)
        else:
            self._apply(event)
        self.compare()

    def _call(self, event: str) -> None:
        if event == "I":
            for target in self.targets:
                import_module(target.module)
        elif event == "H":
            os.environ["DS_PATCHES"] = self.name
            startup.arm()
        else:
            ds_patches.apply(self.name)

    def compare(self) -> None:
        """Demand that status and live objects are what the model says."""
        status = ds_patches.status()[self.name]
        on = {key: model.state for key, model in self.models.items() if model.on}
        assert status.targets == on, (status, on)
        shadowed = {*on.values()} - {WrapperState.ON_TOP}
        expected = {State.SHADOWED if shadowed else State.APPLIED} if on else self.resting
        assert status.state in expected, (status, expected)
        live_now = bool(on) and WrapperState.REPLACED not in on.values()
        assert status.live is live_now is ds_patches.is_applied(self.name)
        for target in self.targets:
            assert self.models or target.module not in sys.modules, "the hook imports nothing"
            if self.models:
                self._compare_raw(target, self.models[target.key])
        if around := sys.modules.get("ds_patches.sample.around"):
            assert around.log == self.activations

    def finish(self) -> None:
        """Take all back, the second library too, and demand the originals."""
        ds_patches.unapply(self.name)
        for target in self.targets:
            if target.key in self.second:
                setattr(*live.site(target), self.second[target.key][1])
        ds_patches.unapply(self.name)
        for target in self.targets:
            assert _raw(target) is self.originals[target.key], target.key

    def _apply(self, event: str) -> None:
        self.waits = False
        self._call(event)
        if not self.originals:  # the patch imported the targets itself, nobody came before it
            layers = lifecycle.lives[self.name].journal.layers.items()
            self._take_originals({at.key: live.beneath_ours(one.original) for one, at in layers})
        for model in self.models.values():
            model.put("ours", *model.watch)
        self.activations.append("activate")
        raws, status = [id(_raw(target)) for target in self.targets], ds_patches.status()
        assert ds_patches.apply(self.name) == status[self.name]
        assert [id(_raw(target)) for target in self.targets] == raws
        self.resting = {State.REVERTED}

    def _apply_in_vain(self, event: str) -> None:
        self.resting = {State.SHAPE_CHANGED}
        refused = pytest.raises(ds_patches.PatchNotApplied, match="shape changed")
        with nullcontext() if event == "H" else refused:
            self._call(event)
        for model in self.models.values() if event == "H" else ():  # as other ranks may have it
            model.put(*model.watch)

    def _unapply(self) -> None:
        if self.waits:
            self.resting, self.waits = {State.REVERTED}, False
        if any(model.on for model in self.models.values()):
            self.activations.append("deactivate")
        for model in self.models.values():
            model.unapply()
        status = ds_patches.unapply(self.name)
        assert ds_patches.unapply(self.name) == status

    def _wrap(self, style: str) -> None:
        self.style = style
        if State.READY in self.resting and style in OPAQUE:
            self.resting = {State.SHAPE_CHANGED}
        for target in self.targets:
            self.models[target.key].wrap(style)
            if (raw := _raw(target)) is not live.MISSING:
                self.second[target.key] = _second(style, raw), raw
                setattr(*live.site(target), self.second[target.key][0])

    def _take_originals(self, raws: dict[str, Any]) -> None:
        if not self.originals:
            self.originals = raws
            self.models = {
                key: Model(raw is not live.MISSING, watched=key == agreement._INIT.key)
                for key, raw in raws.items()
            }

    def _compare_raw(self, target: Target, model: Model) -> None:
        raw, key = _raw(target), target.key
        original, second = self.originals[key], self.second.get(key, (None, None))[0]
        if model.layers and model.layers[-1] != "second":
            assert raw is not original, key
            assert raw is not second, key
        else:
            assert raw is (second if model.layers else original), key
        if self.name == "sample" and model.layers:
            expected = model.on and "ours" in model.layers
            assert fake.is_marked(target.qualname) is expected, (key, model.layers)


def _raw(target: Target) -> Any:
    return live.raw(*live.site(target))


def _second(style: str, raw: Any) -> Any:
    if style == "P":
        return lambda *args, **kwargs: ("second",)
    bare = lambda *args, **kwargs: raw(*args, **kwargs)  # noqa: E731
    return wraps(raw)(bare) if style == "F" else bare


def walk_all(walk: Walk, done: str, words: list[str]) -> None:
    """Walk the tree of all words that start with `done`, depth first, forking at every branch."""
    if done in words:
        _in_a_child(done, walk.finish, lambda: print(json.dumps([done, ""]), flush=True))
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
        print(json.dumps([path, traceback.format_exc()]), flush=True)
    os._exit(0)


def demand(which: Callable[[], list[str]], *arguments: str, path: tuple[Path, ...] = ()) -> None:
    said = fake.run("", *path, arguments=("-m", __name__, which.__name__, *arguments)).stdout
    found = dict(json.loads(line) for line in said.splitlines() if line.startswith('["'))
    assert not [f"{word}: {text}" for word, text in found.items() if text]
    assert sorted(found) == sorted(which()), said


def test_the_sample_in_every_ordering(place: fake.Place) -> None:
    demand(every, "sample", str(place.patches), path=(place.deepspeed,))


QUICK = [(name, alone) for name in ("accumulation", "coalesce", "dc_fallback")]
ALL = [
    # It wraps what accumulation wraps too, which the model of a target does not know.
    pytest.param(
        name, alone if name == "half_without_zero" else every, marks=pytest.mark.exhaustive
    )
    for name, patch in registry.patches().items()
    if release.covers(patch.supported, release.installed().version)
]


@pytest.mark.parametrize(("name", "which"), [*QUICK, *ALL])
def test_a_patch_in_many_orderings(name: str, which: Callable[[], list[str]]) -> None:
    demand(which, name)


if __name__ == "__main__":
    which, name, *folders = sys.argv[1:]
    gc.disable()  # in a child it would copy most of what the fork shares
    import_module("wrapt" if folders else "torch")  # once, not in each child that needs it
    for folder in folders:
        fake.add_patches(folder)
    walk_all(Walk(name), "", globals()[which]())
