"""Every patch through every ordering of what can happen to it, each in its own process.

    python -m tests.core.test_lifecycle every|alone PATCH [FOLDER OF PATCHES]

An ordering is a word of these letters, one for each event:

    I import the targets   A apply, or H the start-up hook waits   U unapply   R apply again
    F C P  a second library wraps every target, by functools.wraps or by a bare closure, or it puts
           a plain function in its place

The walk forks before every event: each ordering has a fresh interpreter's history of its own events
alone. After every event the live objects and the status are compared with what a model of the
ordering expects; at the end all is taken back and the originals must be there, by identity.

The hook comes first, as an interpreter starts: the import applies then, or nothing if the patch was
taken back before.
"""

import gc
import itertools
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import ds_patches
from ds_patches.core import gate, lifecycle, live, registry, release
from ds_patches.core.patch import Target
from ds_patches.core.state import State, WrapperState
from ds_patches.startup import command
from tests.core import fake

SECOND = "FCP"
#: Those whose wrapper does not say what it wraps: the gate refuses beneath them, and a patch
#: beneath one counts as not live.
OPAQUE = "CP"


def every() -> list[str]:
    """Return every ordering: apply, unapply, apply again in this order, the others anywhere."""
    words = []
    for first, second in itertools.product("AH", ("", *SECOND)):
        for word in map("".join, itertools.permutations(f"I{first}UR{second}")):
            # A second library imports what it wraps, so before it the targets are imported: by
            # whoever else imports them, and the hook does not.
            before = word.partition(second)[0] if second else "I"
            is_ordered = word.index(first) < word.index("U") < word.index("R")
            if is_ordered and "H" not in word[1:] and {*before} & {*"IAR"}:
                words.append(word)
    return words


def alone() -> list[str]:
    """Return those without a second library."""
    return [word for word in every() if not {*word} & {*SECOND}]


class Walk:
    """One patch, the events so far, and the model: what they should have led to.

    layers: what lies over each target's original, bottom first: "ours", "second".
    on: the patch was applied, and not taken back. resting: its state while it is off.
    waits: the hook is there, and DeepSpeed is not imported.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.targets = gate.targets(registry.patch(name), release.installed().version)
        self.originals: dict[str, Any] = {}
        self.second: dict[str, tuple[Any, Any]] = {}  # and what lies beneath
        self.layers: list[str] = []
        self.style, self.resting = "", State.READY
        self.on = self.waits = False
        self.activations: list[str] = []

    def step(self, event: str) -> None:
        """Run one event, then compare the live objects with the model."""
        if event == "U":
            self._unapply()
        elif event in SECOND:
            self._wrap(event)
        elif event == "I" and not self.waits:
            self._import_targets()
            self.originals = self.originals or {t.key: self._raw(t) for t in self.targets}
        elif event == "H":
            os.environ["DS_PATCHES"] = self.name
            runpy.run_path(str(command.HOOK / "sitecustomize.py"))
            self.waits = True
        elif self.style and self.style in OPAQUE:
            with pytest.raises(ds_patches.PatchNotApplied, match="refused"):
                ds_patches.apply(self.name)
        else:
            self._apply(event)
        self.compare()

    def compare(self) -> None:
        """Demand that status and live objects are what the model says."""
        status, state = ds_patches.status()[self.name], self._wrapper_state()
        assert status.targets == ({t.key: state for t in self.targets} if self.on else {}), status
        is_live = self.on and state is not WrapperState.REPLACED
        expected = State.APPLIED if is_live else State.FAILED if self.on else self.resting
        assert status.state is expected, (status, expected)
        assert status.live is is_live is ds_patches.is_applied(self.name)
        for target in self.targets:
            assert self.originals or target.module not in sys.modules, "the hook imports nothing"
            if self.originals:
                self._compare_raw(target)
        if around := sys.modules.get("ds_patches.sample.around"):
            assert around.log == self.activations

    def finish(self) -> None:
        """Take all back, the second library too, and demand the originals."""
        ds_patches.unapply(self.name)
        for target in self.targets:
            if target.key in self.second:  # it may put back a wrapper of ours, switched off
                setattr(*live.site(target), self.second[target.key][1])
        for target in self.targets:
            raw = self._raw(target)
            assert beneath(raw) is self.originals[target.key], target.key
            assert raw is self.originals[target.key] or self.style, target.key
            assert not (self.name == "sample" and fake.depth(target.qualname)), target.key

    def _wrapper_state(self) -> WrapperState:
        is_over = self.layers[-1:] == ["second"]
        if "ours" not in self.layers or (is_over and self.style in OPAQUE):
            return WrapperState.REPLACED
        return WrapperState.WRAPPED_OVER if is_over else WrapperState.ON_TOP

    def _apply(self, event: str) -> None:
        self.waits = False
        if event == "I":
            self._import_targets()
        else:
            ds_patches.apply(self.name)
        if not self.originals:  # the patch imported the targets itself, nobody came before it
            layers = lifecycle.lifecycles[self.name].journal.layers.items()
            self.originals = {target.key: beneath(layer.original) for layer, target in layers}
        self.on = True
        self.layers += ["ours"] if "ours" not in self.layers else []
        self.activations.append("activate")
        raws, status = [id(self._raw(target)) for target in self.targets], ds_patches.status()
        assert ds_patches.apply(self.name) == status[self.name]
        assert [id(self._raw(target)) for target in self.targets] == raws

    def _import_targets(self) -> None:
        for target in self.targets:
            import_module(target.module)

    def _unapply(self) -> None:
        self.waits = False
        self.activations += ["deactivate"] * self.on
        if self.layers[-1:] == ["ours"]:
            self.layers.pop()
        self.on = False
        status = ds_patches.unapply(self.name)
        assert ds_patches.unapply(self.name) == status

    def _wrap(self, style: str) -> None:
        self.style = style
        self.layers = [*(self.layers if style != "P" else []), "second"]
        if style in OPAQUE:
            self.resting = State.REFUSED
        for target in self.targets:
            raw = self._raw(target)
            self.second[target.key] = _second(style, raw), raw
            setattr(*live.site(target), self.second[target.key][0])

    def _raw(self, target: Target) -> Any:
        """Return the value at a target; not a wrapper of a patch that this one requires."""
        value = live.raw(*live.site(target))
        for name in registry.patch(self.name).requires:
            if live.layer_of(value) in lifecycle.lifecycles[name].journal.layers:
                value = value.__wrapped__
        return value

    def _compare_raw(self, target: Target) -> None:
        raw, key = self._raw(target), target.key
        original, second = self.originals[key], self.second.get(key, (None, None))[0]
        if self.layers[-1:] == ["ours"]:
            assert raw is not original, key
            assert raw is not second, key
        else:
            assert raw is (second if self.layers else original), key
        if self.name == "sample":
            assert fake.depth(target.qualname) == (self.on and "ours" in self.layers), key


def beneath(value: Any) -> Any:
    """Return what lies beneath the wrappers of ours that are on top."""
    return next(layer for layer in live.chain(value) if not live.layer_of(layer))


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
    printed = fake.run("", *path, arguments=("-m", __name__, which.__name__, *arguments)).stdout
    errors = dict(json.loads(line) for line in printed.splitlines() if line.startswith('["'))
    assert not [f"{word}: {text}" for word, text in errors.items() if text]
    assert sorted(errors) == sorted(which()), printed


def test_the_sample_in_every_ordering(place: fake.Place) -> None:
    demand(every, "sample", str(place.patches), path=(place.deepspeed,))


ALL = [
    # It wraps what accumulation wraps too, which the model of a target does not know.
    (name, alone if name == "half_without_zero" else every)
    for name, patch in registry.patches().items()
    # The model's state of rest is that of a patch which `apply_all()` would apply.
    if patch.by_default and release.covers(patch.supported, release.installed().version)
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "which"), ALL)
def test_a_patch_in_many_orderings(name: str, which: Callable[[], list[str]]) -> None:
    demand(which, name)


if __name__ == "__main__":
    which, name, *folders = sys.argv[1:]
    gc.disable()  # in a child it would copy most of what the fork shares
    import_module("wrapt" if folders else "torch")  # once, not in each child that needs it
    for folder in folders:
        fake.add_patches(folder)
    walk_all(Walk(name), "", globals()[which]())
