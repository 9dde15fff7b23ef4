"""The living world itself: answers, errors, deadlines, and that nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.world import RankError, World, WorldTimeout

ROOT = Path(__file__).resolve().parents[2]


def who() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def drawn() -> torch.Tensor:
    return torch.rand(4)


def fail_on_both() -> None:
    raise ValueError(f"no luck on {dist.get_rank()}")


def fail_on_one_while_the_other_waits() -> None:
    if dist.get_rank() == 1:
        raise KeyError("rank 1 gave up")
    dist.barrier()


def exit_hard_on_one() -> None:
    if dist.get_rank() == 0:
        os._exit(7)


def hang_on_both() -> None:
    print("about to sleep", flush=True)
    time.sleep(600)


def imported_here() -> set[str]:
    return {name for name in sys.modules if name.partition(".")[0] == "ds_patches"}


@pytest.mark.core_case
def test_both_ranks_answer_in_rank_order(world: World) -> None:
    answers = world.run(who)
    assert [answer[:2] for answer in answers] == [(0, 2), (1, 2)]
    pids = {answer[2] for answer in answers}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert world.run(who) == answers, "they live on between cases"


def test_every_case_starts_from_the_same_seed(world: World) -> None:
    first, second = world.run(drawn), world.run(drawn)
    for other in (first[1], *second):
        assert torch.equal(first[0], other)


def test_an_exception_carries_its_rank_and_traceback(world: World) -> None:
    with pytest.raises(RankError) as caught:
        world.run(fail_on_both)
    assert f"ValueError: no luck on {caught.value.rank}" in caught.value.text
    assert "in fail_on_both" in caught.value.text
    for rank in (0, 1):
        assert f"ValueError: no luck on {rank}" in str(caught.value)


def test_one_rank_fails_alone_and_the_next_case_finds_a_working_world(world: World) -> None:
    before = world.run(who)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        world.run(fail_on_one_while_the_other_waits)
    assert time.monotonic() - start < 30
    assert caught.value.rank == 1 or "rank 1 gave up" in str(caught.value)
    assert "KeyError: 'rank 1 gave up'" in str(caught.value)
    assert "in fail_on_one_while_the_other_waits" in str(caught.value)

    after = world.run(who)
    assert [answer[:2] for answer in after] == [(0, 2), (1, 2)]
    assert {a[2] for a in after}.isdisjoint(b[2] for b in before)
    for _, _, pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.exhaustive
def test_a_rank_that_exits_is_an_error(world: World) -> None:
    with pytest.raises(RankError, match="exited with code 7") as caught:
        world.run(exit_hard_on_one)
    assert caught.value.rank == 0


def test_a_deadline_shows_output_and_stacks(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And a lock that may be what the ranks wait for."""
    from tests.doctor.test_locks import MINUTE, lock_of  # which no rank is to import

    lock_of(tmp_path / "deepspeed_shm_comm", age=2 * MINUTE)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    world.run(who)  # the deadline is the case's, not the start's
    with pytest.raises(WorldTimeout, match=r"no answer from ranks \[0, 1\] in 1 s") as caught:
        world.within(1).run(hang_on_both)
    text = str(caught.value)
    for rank in (0, 1):
        assert f"rank {rank}: output" in text
    assert text.count("about to sleep") == 2
    assert text.count("in hang_on_both") == 2
    assert f"{tmp_path}/deepspeed_shm_comm/lock is 2 minutes old" in text
    assert f"rm {tmp_path}/deepspeed_shm_comm/lock\n" in text


@pytest.mark.exhaustive
def test_a_fresh_world_shares_no_interpreter(world: World, fresh_world: World) -> None:
    shared, own = world.run(who), fresh_world.run(who)
    assert {a[2] for a in shared}.isdisjoint(b[2] for b in own)
    assert fresh_world.run(imported_here) == [set(), set()]
    assert world.run(who) == shared


@pytest.mark.exhaustive
def test_ranks_die_with_the_process_that_started_them() -> None:
    script = (
        "import os, signal\n"
        "from tests.world.test_world import who\n"
        "from tests.world import World\n"
        "print(*(pid for _, _, pid in World().run(who)), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"ranks {pids} outlived their parent"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
