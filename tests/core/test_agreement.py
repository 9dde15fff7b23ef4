"""Ranks compare their patches when an engine is built: real engines, real ranks, no hang."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import ds_patches
from ds_patches.core import agreement, gate, live, registry
from tests.harness.run import applied
from tests.harness.trainers import engine_of
from tests.listening import listening
from tests.world import World, on_ranks


@pytest.fixture(scope="module")
def name() -> str:
    """A patch that may be applied to the installed release, and that ranks must have alike."""
    for patch in registry.patches().values():
        if patch.collectives and gate.check(patch).may_apply:
            return patch.name
    pytest.skip("no such patch may be applied to this release")


@contextmanager
def impatient() -> Iterator[pytest.MonkeyPatch]:
    """Wait for a silent rank for two seconds only."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(agreement, "patience", lambda group, device: 2.0)
        agreement.store().delete_key(f"{agreement._KEY}/{dist.get_rank()}")
        dist.barrier()
        try:
            yield monkeypatch
        finally:
            ds_patches.unapply_all()


#: What the two ranks do, to have the patch or not to have it: see `have`.
Ways = tuple[str, str]


def have(way: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way in ("apply", "refuse"):
        if way == "refuse":  # somebody else's function stands in a target's place
            owner, attribute = live.site(registry.patch(name).targets[0]) or (object, "")
            function = live.raw(owner, attribute)
            theirs = lambda *args, **kwargs: function(*args, **kwargs)  # noqa: E731
            monkeypatch.setattr(owner, attribute, theirs)
        assert ds_patches.apply_all(only=name)[name].live is (way == "apply")
    elif way == "leave out":
        ds_patches.apply_all(only=name, skip=name)


def another(name: str) -> str:
    """Return a patch that ranks must have alike as well, and that does not require `name`."""
    for other, patch in registry.patches().items():
        is_free = patch.collectives and other != name and name not in patch.requires
        if is_free and gate.check(patch).may_apply:
            return other
    raise LookupError(name)


def built(ways: Ways, name: str, *others: str) -> tuple[str, list[str]]:
    """Apply, others on both ranks; build a ZeRO-3 engine; what that raised and logged on a rank."""
    with impatient() as monkeypatch, listening(logging.INFO) as heard:
        for other in others:
            ds_patches.apply(other)
        have(ways[dist.get_rank()], name, monkeypatch)
        try:
            engine_of(stage=3)
        except ds_patches.RanksDisagree as error:
            return str(error), heard
        return "", heard


@pytest.mark.core_case
def test_ranks_that_agree(world: World, name: str) -> None:
    """Rank 0 says so, once."""
    (error, heard), second = world.run(built, ("apply", "apply"), name)
    assert (error, second) == ("", ("", []))
    assert [f"{name} live on all 2 ranks" in line for line in heard if "live" in line] == [True]


def test_a_rank_without_the_patch_is_named_and_nothing_hangs(world: World, name: str) -> None:
    """Such a rank goes on as on stock."""
    for ways in (("apply", ""), ("", "apply"), ("apply", "leave out"), ("apply", "refuse")):
        errors = [error for error, _ in world.run(built, ways, name)]
        has = ways.index("apply")
        assert f"rank {1 - has} did not post which patches" in errors[has], ways
        assert not errors[1 - has], ways


def test_a_rank_that_has_another_patch_says_why(world: World, name: str) -> None:
    for error, _ in world.run(built, ("apply", "refuse"), name, another(name)):
        assert re.search(f"{name} is live on rank 0.* refused .*on rank 1", error, re.DOTALL)
        assert "did not post" not in error


def no_store() -> None:
    """As of PyTorch's fake process group."""
    with mock.patch.object(dist, "get_backend", return_value="fake"):
        assert store_as_it_is() is None


def store_of_a_rank_that_has_ended() -> dist.TCPStore:
    host = "127.0.0.1"
    server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return dist.TCPStore(host, server.port, is_master=False)


store_as_it_is = agreement.store


@on_ranks
@pytest.mark.parametrize(
    ("store", "words"),
    [
        (no_store, ["has no store, so the patches of its ranks are not compared"]),
        (store_of_a_rank_that_has_ended, ["are not compared, since one has ended"] * 2),
    ],
)
def test_ranks_that_cannot_be_compared(
    name: str, store: Callable[[], Any], words: list[str]
) -> None:
    with impatient() as monkeypatch, listening(logging.INFO) as heard:
        monkeypatch.setattr(agreement, "store", store)
        ds_patches.apply(name)
        assert engine_of(stage=1)
        assert engine_of(stage=3)
    lines = [line for line in heard if "not compared" in line]
    assert len(lines) == len(words)
    assert all(text in line for text, line in zip(words, lines, strict=True)), lines


def test_patches_that_change_no_collective_may_differ(name: str) -> None:
    with applied(name), pytest.MonkeyPatch.context() as monkeypatch:
        assert agreement.rank_patches()[name] == "live"
        quiet = replace(registry.patch(name), collectives=False)
        monkeypatch.setattr(registry, "patches", lambda: {name: quiet})
        assert "live" not in agreement.rank_patches().values()
    assert "live" not in agreement.rank_patches().values()


# --- Over one store, without ranks ----------------------------------------------------------------

VERSIONS = {"ds_patches": "0.1.0", "DeepSpeed": "0.19.8"}
LIVE = VERSIONS | {"one": "live", "two": "live"}
OFF = VERSIONS | {"one": "off", "two": "out of range"}
OLDER = LIVE | {"DeepSpeed": "0.19.7"}


@pytest.mark.parametrize(
    ("holdings", "verdict"),
    [
        ([LIVE, LIVE, LIVE], "$"),
        ([LIVE, OLDER, LIVE], "DeepSpeed is 0.19.8 on ranks 0, 2, 0.19.7 on rank 1$"),
        (
            [LIVE, LIVE | {"one": "off"}, LIVE, VERSIONS | {"two": "live"}],
            "one is live on ranks 0, 2, off on rank 1, unknown to ds_patches on rank 3$",
        ),
        ([LIVE, OFF | {"DeepSpeed": "0.1"}], "DeepSpeed is .*; one is .*; two is live on rank 0, "),
        # what is live nowhere may be so for any reason
        ([OFF, VERSIONS | {"one": "gone"}], "$"),
        ([LIVE, OLDER] * 500, r"(?=.{,200}$)DeepSpeed is 0.19.8 on 500 ranks \(0, 2, 4,"),
        ([LIVE, None, LIVE], "after .* rank 1 did not post.* DS_PATCHES"),
    ],
)
def test_what_ranks_have_posted_comes_to_a_verdict(
    monkeypatch: pytest.MonkeyPatch, holdings: list[dict[str, str] | None], verdict: str
) -> None:
    """None has posted nothing. Whom the others wait for is logged once."""
    store = dist.HashStore()
    for rank, posted in enumerate(holdings):
        if posted:
            store.set(f"{agreement._KEY}/{rank}", json.dumps(posted))
    monkeypatch.setattr(agreement, "_WARN_AFTER", 0.1)
    with listening() as heard:
        assert re.match(verdict, agreement.compare_posted(store, range(len(holdings)), 0.6))
    waits = [line for line in heard if "an engine: rank 1 did not post" in line]
    assert len(waits) == (None in holdings)
