"""Ranks compare their patches when an engine is built: real engines, real ranks, no hang."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

import ds_patches
from ds_patches.core import agreement, gate, live, registry
from tests.core import engines
from tests.listening import listening
from tests.world import World


def status_file(folder: str, name: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("DS_PATCHES_STATUS_FILE", f"{folder}/status.json")
        built_with(name, on=(0, 1))


def test_rank_0_leaves_the_status_of_the_job(world: World, name: str, tmp_path: Path) -> None:
    world.run(status_file, str(tmp_path), name)
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    assert (found["ranks"], found["trouble"]) == (2, "")
    assert found["patches"][name]["live"]
    assert found["versions"]["ds_patches"] == ds_patches.__version__


@pytest.fixture(scope="module")
def name() -> str:
    """A patch with an option, that may be applied to the installed release."""
    for patch in registry.patches().values():
        if patch.options and patch.collectives and gate.check(patch).may_apply:
            return patch.name
    pytest.skip("no patch with an option may be applied to this release")


def build() -> str:
    """Build a ZeRO-3 engine; returns what that raised."""
    try:
        engines.build(stage=3)
    except ds_patches.RanksDisagree as error:
        return str(error)
    return ""


def built_with(name: str, on: tuple[int, ...], choices: tuple[str, ...] = ()) -> Built:
    """Apply the patch on these ranks, build an engine."""
    (option,) = registry.patch(name).options[:1]
    rank = dist.get_rank()
    with impatient(), listening(logging.INFO) as heard:
        if rank in on:
            ds_patches.apply(name, **({option.name: choices[rank]} if choices else {}))
        begin = time.monotonic()
        return Built(build(), heard, time.monotonic() - begin)


class Built(NamedTuple):
    """What building an engine raised and logged on one rank, and the seconds it took."""

    trouble: str
    said: list[str]
    seconds: float


@contextmanager
def impatient() -> Iterator[None]:
    """Wait for a silent rank for two seconds only; leave the ranks as they were found."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("DS_PATCHES_RANK_TIMEOUT", "2")
        monkeypatch.setattr(agreement, "PATIENCE", 1.0)
        try:
            yield
        finally:
            ds_patches.unapply_all()
            # A rank without the patch has counted no engine. A job ends there; these ranks go on.
            counts = [0] * dist.get_world_size()
            ranks = tuple(range(dist.get_world_size()))
            dist.all_gather_object(counts, agreement._built[ranks])
            agreement._built[ranks] = max(counts)


@pytest.mark.core_case
def test_ranks_that_agree(world: World, name: str) -> None:
    first, second = world.run(built_with, name, (0, 1))
    assert (first.trouble, second.trouble, second.said) == ("", "", [])
    (line,) = [line for line in first.said if "live" in line]
    assert f"{name} live on all 2 ranks" in line
    assert "DeepSpeed" in line


@pytest.mark.parametrize("on", [(0,), (1,)])
def test_a_rank_without_the_patch_is_named_and_nothing_hangs(
    world: World, name: str, on: tuple[int, ...]
) -> None:
    found = world.run(built_with, name, on)
    (patched,), (bare,) = on, {0, 1} - set(on)
    assert f"rank {bare} did not say which patches" in found[patched].trouble
    assert found[patched].seconds < 20
    assert found[bare].trouble == "", "stock goes on"


def left_out_on_rank_1(name: str) -> str:
    with impatient():
        ds_patches.apply_all(only=name, skip=() if dist.get_rank() == 0 else name)
        return build()


def test_a_rank_that_was_told_to_leave_the_patch_out_says_so(world: World, name: str) -> None:
    patched, bare = world.run(left_out_on_rank_1, name)
    assert f"{name} is live" in patched
    assert "on rank 1" in patched
    assert "did not say" not in patched
    assert bare == "", "the other one refuses"


def changed_environment(name: str) -> str:
    with impatient():
        ds_patches.apply(name)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("DS_PATCHES_TYPO", "1")
            return build()


def test_flags_are_read_when_patches_are_applied(world: World, name: str) -> None:
    assert world.run(changed_environment, name) == ["", ""]


def test_options_that_differ(world: World, name: str) -> None:
    (option,) = registry.patch(name).options[:1]
    chosen = option.choices[:2]
    for built in world.run(built_with, name, (0, 1), chosen):
        for rank, choice in enumerate(chosen):
            found = rf"{option.name}={choice}(, \w+=[\w,]+)* on rank {rank}"
            assert re.search(found, built.trouble), built.trouble


def refused_on_rank_1(name: str) -> str:
    """On one rank somebody else's function stands in a target's place."""
    owner, attribute = live.site(registry.patch(name).targets[0]) or (object, "")
    original = live.raw(owner, attribute)
    with impatient(), pytest.MonkeyPatch.context() as monkeypatch:
        if dist.get_rank() == 1:
            monkeypatch.setattr(owner, attribute, lambda *args, **kwargs: original(*args, **kwargs))
        assert ds_patches.apply_all(only=name)[name].live is (dist.get_rank() == 0)
        return build()


def test_a_rank_where_the_patch_is_refused_says_why(world: World, name: str) -> None:
    patched, bare = world.run(refused_on_rank_1, name)
    assert f"{name} is live" in patched
    assert "shape changed" in patched
    assert "on rank 1" in patched
    assert bare == (patched if registry.patch(name).requires else ""), "what it requires is live"


def test_patches_that_change_no_collective_may_differ(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ds_patches.apply(name)
    try:
        assert name in agreement.holdings().live
        quiet = replace(registry.patch(name), collectives=False)
        monkeypatch.setattr(registry, "patches", lambda: {name: quiet})
        assert not agreement.holdings().live
    finally:
        monkeypatch.undo()
        ds_patches.unapply(name)
    assert not agreement.holdings().live
