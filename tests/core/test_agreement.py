"""Ranks compare their patches when an engine is built: real engines, real ranks, no hang."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ds_patches
from ds_patches.core import agreement, flags, gate, live, registry
from ds_patches.core.agreement import Holdings
from tests import shell
from tests.harness.run import applied
from tests.harness.trainers import engine_of
from tests.listening import listening
from tests.shell import python
from tests.world import World


@pytest.fixture(scope="module")
def name() -> str:
    """A patch that may be applied to the installed release, and that ranks must have alike."""
    for patch in registry.patches().values():
        if patch.collectives and gate.check(patch).may_apply:
            return patch.name
    pytest.skip("no such patch may be applied to this release")


@contextmanager
def impatient() -> Iterator[pytest.MonkeyPatch]:
    """Wait for a silent rank for two seconds only; leave the ranks as they were found."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(agreement, "PATIENCE", 2.0)
        monkeypatch.setattr(agreement, "_READING", 1.0)
        try:
            yield monkeypatch
        finally:
            ds_patches.unapply_all()
            # A rank without the patch has not met. A job ends there; these ranks go on.
            places = [""] * dist.get_world_size()
            me, ranks = dist.get_rank(), range(dist.get_world_size())
            dist.all_gather_object(places, agreement.meeting("ranks", ranks, me))
            met = [int(place.rpartition("/")[2]) for place in places]
            for _ in range(max(met) - met[me]):
                agreement.meeting("ranks", ranks, me)


def everywhere(name: str, _: pytest.MonkeyPatch) -> None:
    ds_patches.apply(name)


def on_one(name: str, _: pytest.MonkeyPatch, rank: int) -> None:
    if dist.get_rank() == rank:
        ds_patches.apply(name)


def left_out_on_rank_1(name: str, _: pytest.MonkeyPatch) -> None:
    ds_patches.apply_all(only=name, skip=() if dist.get_rank() == 0 else name)


def refused_on_rank_1(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank somebody else's function stands in a target's place."""
    owner, attribute = live.site(registry.patch(name).targets[0]) or (object, "")
    original = live.raw(owner, attribute)
    if dist.get_rank() == 1:
        monkeypatch.setattr(owner, attribute, lambda *args, **kwargs: original(*args, **kwargs))
    assert ds_patches.apply_all(only=name)[name].live is (dist.get_rank() == 0)


def built(apply: Any, name: str, status_file: str = "") -> tuple[str, list[str]]:
    """Apply, build a ZeRO-3 engine; what that raised and logged on a rank, which is soon."""
    with impatient() as monkeypatch, listening(logging.INFO) as heard:
        monkeypatch.setenv("DS_PATCHES_STATUS_FILE", status_file)
        apply(name, monkeypatch)
        begin = time.monotonic()
        monkeypatch.setenv("DS_PATCHES_TYPO", "1")  # flags were read when patches were applied
        try:
            engine_of(stage=3)
        except ds_patches.RanksDisagree as error:
            assert time.monotonic() - begin < 20
            return str(error), heard
        finally:
            monkeypatch.delenv("DS_PATCHES_TYPO")
        return "", heard


@pytest.mark.core_case
def test_ranks_that_agree(world: World, name: str, tmp_path: Path) -> None:
    """Rank 0 says so, once, and leaves the status of the job."""
    file = tmp_path / "status.json"
    first, second = world.run(built, everywhere, name, str(file))
    assert second == ("", [])
    assert first[0] == ""
    (line,) = [line for line in first[1] if "live" in line]
    assert f"{name} live on all 2 ranks" in line
    assert [*tmp_path.iterdir()] == [file]
    found = json.loads(file.read_text())
    assert (found["ranks"], found["trouble"]) == (2, "")
    assert found["patches"][name]["live"]
    assert found["versions"]["ds_patches"] == ds_patches.__version__


def test_the_status_file_is_written_through_no_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever lies beside it: by the names that it was written under, and those to come."""
    file, mine = tmp_path / "status.json", tmp_path / "mine"
    mine.write_text("of another job")
    Path(f"{file}.{os.getpid()}").symlink_to(mine)
    Path(f"{file}.{os.getpid()}.17").symlink_to(mine)
    file.symlink_to(mine)
    monkeypatch.setattr(agreement, "_requests", flags.Requests(False, {}, status_file=str(file)))
    with pytest.MonkeyPatch.context() as guessed, listening() as heard:
        guessed.setattr(agreement.time, "time_ns", lambda: 17)
        agreement._leave(1, "")
    assert (file.is_symlink(), len(heard)) == (True, 1)
    agreement._leave(1, "")
    assert (file.is_symlink(), json.loads(file.read_text())["ranks"]) == (False, 1)
    assert mine.read_text() == "of another job"


FAKE = """
import deepspeed, torch, torch.distributed as dist, ds_patches
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
if {patched}:
    ds_patches.apply_all()
net = torch.nn.Linear(4, 4)
config = dict(train_micro_batch_size_per_gpu=1, zero_optimization=dict(stage={stage}))
config["zero_allow_untested_optimizer"] = True
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
"""


@pytest.mark.parametrize("stage", [1, 3])
def test_a_fake_process_group_has_nobody_to_compare_with(stage: int) -> None:
    scripts = [FAKE.format(patched=patched, stage=stage) for patched in (False, True)]
    done = [shell.python("-c", one, variables={"LOCAL_RANK": "0"}) for one in scripts]
    assert [one.returncode for one in done] == [0, 0], done[1].stderr
    assert " live\n" in done[1].stderr


@pytest.mark.parametrize("on", [0, 1])
def test_a_rank_without_the_patch_is_named_and_nothing_hangs(
    world: World, name: str, on: int
) -> None:
    found = world.run(built, partial(on_one, rank=on), name)
    assert f"rank {1 - on} did not say which patches" in found[on][0]
    assert found[1 - on][0] == "", "stock goes on"


@pytest.mark.parametrize(
    ("apply", "told"), [(left_out_on_rank_1, ""), (refused_on_rank_1, "shape changed")]
)
def test_a_rank_that_has_it_not_says_why(world: World, name: str, apply: object, told: str) -> None:
    (patched, _), (bare, _) = world.run(built, apply, name)
    for said in (f"{name} is live", told, "on rank 1"):
        assert said in patched
    assert "did not say" not in patched
    assert bare == (patched if "shape" in told and registry.patch(name).requires else "")


ENDS = """
import os, time
import deepspeed, deepspeed.ops, ds_patches, torch
from ds_patches.core import agreement
from tests.harness.options import config

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
ds_patches.apply_all()
first, compare = os.environ["RANK"] == "0", agreement.compare
# Comes last, finds that all is well, and is gone before the other asks again.
agreement.compare = lambda engine: (time.sleep(2 * first), compare(engine))
model = torch.nn.Linear(2, 2)
deepspeed.initialize(model=model, config=config(1), optimizer=torch.optim.SGD(model.parameters()))
if not first:
    time.sleep(1)
    print("trained on", flush=True)
os._exit(0)
"""


def test_a_rank_that_ends_early_takes_no_other_with_it() -> None:
    """It has the store, as without torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    world = {**where, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with ThreadPoolExecutor(2) as pool:
        each = ({**world, "RANK": rank} for rank in "01")
        _, second = pool.map(lambda one: python("-c", ENDS, variables=one), each)
    assert "trained on" in second.stdout, second.stderr[-2000:]


def test_patches_that_change_no_collective_may_differ(name: str) -> None:
    with applied(name), pytest.MonkeyPatch.context() as monkeypatch:
        assert name in agreement.holdings().live
        quiet = replace(registry.patch(name), collectives=False)
        monkeypatch.setattr(registry, "patches", lambda: {name: quiet})
        assert not agreement.holdings().live
    assert not agreement.holdings().live


# --- With threads for ranks over one store --------------------------------------------------------

VERSIONS = {"ds_patches": "0.1.0", "DeepSpeed": "0.19.8"}
LIVE = Holdings(["one", "two"], VERSIONS | {"one": "live", "two": "live"})
OFF = Holdings([], VERSIONS | {"one": "off", "two": "out of range"})
OLDER = LIVE._replace(told=LIVE.told | {"DeepSpeed": "0.19.7"})


def test_differences_name_what_and_where() -> None:
    other = Holdings(["two"], {"DeepSpeed": "0.19.7", "ds_patches": "0.1.0", "two": "live"})
    half = Holdings(["two"], VERSIONS | {"one": "off", "two": "live"})
    assert [*agreement.differences({0: LIVE, 1: half, 2: LIVE, 3: other})] == [
        "DeepSpeed is 0.19.8 on ranks 0-2, 0.19.7 on rank 3",
        "one is live on ranks 0, 2, off on rank 1, unknown to ds_patches on rank 3",
    ]
    (many,) = agreement.differences({rank: (LIVE, OLDER)[rank % 2] for rank in range(1000)})
    assert "0.19.8 on 500 ranks (0, 2, 4," in many
    assert len(many) < 200
    # What is live nowhere may be so for any reason.
    assert not [*agreement.differences({0: OFF, 1: OFF._replace(told=VERSIONS | {"one": "gone"})})]


@pytest.mark.parametrize(
    ("holdings", "verdict"),
    [
        ([LIVE, LIVE, LIVE], "$"),
        ([LIVE, OLDER, LIVE], "DeepSpeed is 0.19.8 on ranks 2, 6, 0.19.7 on rank 5$"),
        ([OFF, LIVE, LIVE], "one is (?=.*live on rank).*off on rank 2"),
        ([LIVE, OFF, LIVE], "one is (?=.*live on rank).*off on rank 5"),
        ([OFF, None, OFF], "$"),
        ([None, OFF, OFF], "$"),
        ([None, LIVE, LIVE], "after .* rank 2 did not say.* DS_PATCHES"),
        ([LIVE, None, LIVE], "after .* rank 5 did not say.* DS_PATCHES"),
    ],
)
def test_ranks_with_live_patches_come_to_one_verdict(
    monkeypatch: pytest.MonkeyPatch,
    holdings: list[Holdings | None],
    verdict: str,
) -> None:
    """Of three, each a thread; None says nothing. Where nothing is live, all is well."""
    store, ranks, verdicts = dist.HashStore(), (2, 5, 6), {}
    monkeypatch.setattr(agreement, "PATIENCE", 0.6 if None in holdings else 60.0)
    monkeypatch.setattr(agreement, "_READING", 0.3)

    def one(rank: int, mine: Holdings) -> None:
        verdicts[rank] = agreement.exchange(store, "here", ranks, rank, mine)

    said = {rank: mine for rank, mine in zip(ranks, holdings, strict=True) if mine}
    threads = [threading.Thread(target=one, args=item) for item in said.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), "bounded"
    assert verdicts.keys() == said.keys()
    for rank, mine in said.items():
        assert re.match(verdict if mine.live else "$", verdicts[rank]), verdicts


def test_a_rank_that_waits_leaves_the_store_open_to_other_threads() -> None:
    store, absent = dist.TCPStore("127.0.0.1", 0, 1, True), list[int]()
    wait = lambda: absent.extend(agreement.come(store, "here", (0, 1), 0, 1.0))  # noqa: E731
    waiting = threading.Thread(target=wait)
    waiting.start()
    while not store.check(["here/0"]):
        pass
    store.set("theirs", "")
    assert waiting.is_alive()
    waiting.join(5)
    assert absent == [1]


def test_ranks_that_meet_again_meet_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes first, and in a store of a process group that is built anew from the start."""
    for store in (dist.HashStore(), dist.HashStore()):
        monkeypatch.setattr(agreement, "store", lambda store=store: store)
        first = [agreement.meeting("ranks", (0, 1), 0) for _ in range(2)]
        assert [agreement.meeting("ranks", (0, 1), 1) for _ in range(2)] == first
        others = [agreement.meeting("ranks", (0, 2), 0), agreement.meeting("block", (0, 1), 0)]
        assert len({*first, *others}) == 4
