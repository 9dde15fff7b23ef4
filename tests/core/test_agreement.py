"""Ranks compare their patches when an engine is built: real engines, real ranks, no hang."""

from __future__ import annotations

import io
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

import ds_patches
from ds_patches.core import agreement, gate, live, registry
from tests.world import World


@pytest.fixture(scope="module")
def name() -> str:
    """A patch with an option, that may be applied to the installed release."""
    for patch in registry.patches().values():
        if patch.options and gate.check(patch).may_apply:
            return patch.name
    pytest.skip("no patch with an option may be applied to this release")


# --- What is said -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([0, 2, 3, 4, 7], "ranks 0, 2-4, 7"),
        ([5, 4], "ranks 4-5"),
    ],
)
def test_ranks_are_named_with_spans(ranks: list[int], text: str) -> None:
    assert agreement._named(ranks) == text


def test_differences_name_what_and_where() -> None:
    same = {"ds_patches": "0.1.0", "DeepSpeed": "0.19.8"}
    everyone = {
        0: same | {"one": "live with mode=soft"},
        1: same | {"one": "disabled (DS_PATCHES_SKIP=one)"},
        2: same | {"one": "live with mode=soft"},
        3: {"ds_patches": "0.1.0", "DeepSpeed": "0.19.7"},
    }
    assert list(agreement.differences(everyone)) == [
        "DeepSpeed is 0.19.8 on ranks 0-2, 0.19.7 on rank 3",
        "one is live with mode=soft on ranks 0, 2, disabled (DS_PATCHES_SKIP=one) on rank 1, "
        "unknown to ds_patches on rank 3",
    ]
    assert not list(agreement.differences({0: same, 1: same}))


# --- The exchange, with threads for ranks -------------------------------------------------------


class FirstEngine(dict[Any, int]):
    """A count that stays at zero."""

    def __missing__(self, key: Any) -> int:
        return 0

    def __setitem__(self, key: Any, value: int) -> None:
        pass


def exchange(
    monkeypatch: pytest.MonkeyPatch, holdings: dict[int, agreement.Holdings | None]
) -> dict[int, str]:
    """Let these ranks compare over one store; None for a rank that says nothing."""
    store, ranks, verdicts = dist.HashStore(), tuple(holdings), {}
    monkeypatch.setattr(agreement, "_store", lambda: store)
    monkeypatch.setattr(agreement, "PATIENCE", 0.3)
    monkeypatch.setenv("DS_PATCHES_RANK_TIMEOUT", "0.6")
    # Threads share what processes do not: the count of engines built.
    monkeypatch.setattr(agreement, "_built", FirstEngine())

    def one(rank: int, mine: agreement.Holdings) -> None:
        verdicts[rank] = agreement._compare(ranks, rank, mine)

    threads = [
        threading.Thread(target=one, args=(rank, mine))
        for rank, mine in holdings.items()
        if mine is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "bounded"
    return verdicts


def test_agreement_is_an_empty_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"one": "live"}
    assert exchange(monkeypatch, {2: mine, 5: mine, 6: mine}) == {2: "", 5: "", 6: ""}


def test_every_rank_gets_the_same_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = exchange(monkeypatch, {2: {"one": "live"}, 5: {"one": "off"}, 6: {"one": "live"}})
    assert verdicts == dict.fromkeys((2, 5, 6), "one is live on ranks 2, 6, off on rank 5")


@pytest.mark.parametrize("silent", [2, 5])
def test_a_silent_rank_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, silent: int
) -> None:
    said: agreement.Holdings = {"one": "live"}
    holdings = {rank: None if rank == silent else said for rank in (2, 5, 6)}
    begin = time.monotonic()
    verdicts = exchange(monkeypatch, holdings)
    assert time.monotonic() - begin < 5
    assert set(verdicts) == {2, 5, 6} - {silent}
    for verdict in verdicts.values():
        assert f"rank {silent} did not say" in verdict
        assert "DS_PATCHES" in verdict
    assert f"rank {silent} did not say" in caplog.text, "warned of before the time is over"


# --- Engines ------------------------------------------------------------------------------------


@contextmanager
def listening() -> Iterator[io.StringIO]:
    """What the package logs, from info on."""
    logger, heard = logging.getLogger("ds_patches"), io.StringIO()
    handler, level = logging.StreamHandler(heard), logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        yield heard
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def build() -> str:
    """Build a ZeRO-3 engine; returns what that raised."""
    import deepspeed
    import torch

    model = torch.nn.Linear(4, 4)
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    try:
        deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config=settings | {"zero_allow_untested_optimizer": True},
        )
    except ds_patches.RanksDisagree as error:
        return str(error)
    return ""


def built_with(name: str, on: tuple[int, ...], choices: tuple[str, ...] = ()) -> Built:
    """Apply the patch on these ranks, build an engine."""
    (option,) = registry.patch(name).options[:1]
    rank = dist.get_rank()
    with impatient(), listening() as heard:
        if rank in on:
            ds_patches.apply(name, **({option.name: choices[rank]} if choices else {}))
        begin = time.monotonic()
        return Built(build(), heard.getvalue(), time.monotonic() - begin)


class Built(NamedTuple):
    """What building an engine raised and logged on one rank, and the seconds it took."""

    trouble: str
    said: str
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
    assert (first.trouble, second.trouble, second.said) == ("", "", "")
    (line,) = [line for line in first.said.splitlines() if "live" in line]
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
    for trouble in world.run(left_out_on_rank_1, name):
        assert f"{name} is live" in trouble
        assert "on rank 1" in trouble
        assert "did not say" not in trouble


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
    for trouble in world.run(refused_on_rank_1, name):
        assert f"{name} is live" in trouble
        assert "shape changed" in trouble
        assert "on rank 1" in trouble


def test_patches_that_change_no_collective_may_differ(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert name in agreement.holdings()
    quiet = replace(registry.patch(name), collectives=False)
    monkeypatch.setattr(registry, "patches", lambda: {name: quiet})
    assert name not in agreement.holdings()


def left_behind(name: str) -> tuple[bool, bool]:
    from deepspeed.runtime.engine import DeepSpeedEngine

    stock = vars(DeepSpeedEngine)["__init__"]
    ds_patches.apply(name)
    wrapped = vars(DeepSpeedEngine)["__init__"]
    ds_patches.unapply(name)
    return wrapped is stock, vars(DeepSpeedEngine)["__init__"] is stock


@pytest.mark.core_case
def test_nothing_is_left_after_unapply(world: World, name: str) -> None:
    assert world.run(left_behind, name) == [(False, True), (False, True)]
