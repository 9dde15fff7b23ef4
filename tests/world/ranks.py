"""The rank processes of one world: start, ask, look at, end."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.world import zygote
from tests.world.zygote import Forked

if TYPE_CHECKING:
    from tests.world.world import World

__tracebackhide__ = True  # pytest shows the test and the ranks' words, not this machinery

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0  # two imports of DeepSpeed on a busy machine
GRACE_SECONDS = 5.0  # what a rank gets to answer in, once another one has failed
LEAVE_SECONDS = 10.0
TAIL_LINES = 60
#: Set in the environment, ranks are forked where that is possible; see `zygote`.
FORK = "TEST_RANKS_FORK"


class WorldTimeout(Exception):
    """No rank failed, but not all returned before the deadline."""


class RankError(Exception):
    """A rank raised or died; the message holds what each of them had to say."""


def environment(world: World, rank: int, port: int) -> dict[str, str]:
    """Return pytest's environment, with the world's variables: DeepSpeed is the same one."""
    return {
        **os.environ,
        **world.variables,
        "DS_ACCELERATOR": world.accelerator,
        # Of a GPU's queues there are 8 by default. Streams that share one wait for each other by
        # accident, and hide a race.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # the output of a killed rank is on file
        # As torchrun has it: rank 0 finds the store there and does not open one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.size),
        **(on_the_only_gpu(rank) if world.accelerator == "cuda" else {}),
    }


def on_the_only_gpu(rank: int) -> dict[str, str]:
    """NCCL refuses a GPU to a second rank of a host, so each is told that it is on a host alone.

    They then talk through sockets: what is right is the same, what is fast is not.
    """
    import torch

    if torch.cuda.device_count() != 1:
        return {}
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


_served: list[str] = []


def may_fork(world: World) -> bool:
    """Return True if ranks may be forked: on the first ranks' accelerator, without variables."""
    if FORK not in os.environ or world.variables:
        return False
    if not _served:
        _served.append(world.accelerator)
        zygote.serve(environment(world, 0, 0))
    return _served == [world.accelerator]


def start(env: dict[str, str], cases: int, lifeline: int, output: int) -> subprocess.Popen[bytes]:
    """An interpreter of its own, which dies with what it starts and hears no Ctrl-C of pytest's."""
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.rank", str(cases), str(lifeline)],
        cwd=ROOT,
        env=env,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=(cases, lifeline),
        start_new_session=True,
    )


class Rank:
    """One rank process, the connection to it and the file with its output."""

    def __init__(
        self, rank: int, env: dict[str, str], lifeline: int, begin: Callable[..., Any]
    ) -> None:
        self.rank = rank
        self.output, name = tempfile.mkstemp(prefix="ds_patches-rank-")
        os.unlink(name)  # open but nameless: a SIGKILL leaves nothing to tidy up
        self.seen = 0  # bytes of output that belong to earlier cases
        self.connection, theirs = Pipe()
        self.process = begin(env, theirs.fileno(), lifeline, self.output)
        theirs.close()

    def send(self, call: tuple[Any, ...] | None) -> None:
        """Send a case ("module:qualname", args, kwargs) to run, or None to leave and exit."""
        self.seen = os.fstat(self.output).st_size
        with suppress(ConnectionError):  # the rank is gone, and receive() says how
            self.connection.send_bytes(pickle.dumps(call))

    def receive(self) -> tuple[bool, Any]:
        """Return True and the case's value; or False and the rank's error, or how it ended."""
        try:
            returned, value = pickle.loads(self.connection.recv_bytes())
            return returned, value
        except (EOFError, ConnectionError):
            try:
                return False, f"exited with code {self.process.wait(GRACE_SECONDS)}"
            except subprocess.TimeoutExpired:
                return False, "hung up, and does not exit"

    def tail(self) -> str:
        # pread, as the rank shares this file's position and writes at it.
        new = os.fstat(self.output).st_size - self.seen
        lines = os.pread(self.output, new, self.seen).decode(errors="replace").splitlines()
        return "\n".join(["", f"----- rank {self.rank}: output -----", *lines[-TAIL_LINES:]])

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.connection.close()
        os.close(self.output)


class Ranks:
    """`size` ranks in one process group. After an error they are ended and not asked again."""

    def __init__(self, world: World) -> None:
        from torch.distributed import TCPStore

        # Here, and not in rank 0: a port that is only looked for may be taken until it is used.
        self.store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        # Only this process holds the writing end: the ranks read its end of file, and so the
        # end of this process, however that came about.
        reading, self.lifeline = os.pipe()
        self.ranks: list[Rank] = []
        begin = Forked if may_fork(world) else start
        try:
            for rank in range(world.size):
                env = environment(world, rank, self.store.port)
                self.ranks.append(Rank(rank, env, reading, begin))
            self.gather(START_SECONDS)
        except BaseException:
            self.end()
            raise
        finally:
            os.close(reading)

    def run(self, call: tuple[Any, ...], seconds: float) -> list[Any]:
        try:
            for rank in self.ranks:
                rank.send(call)
            return self.gather(seconds)
        except BaseException:  # KeyboardInterrupt too: the ranks are in the middle of a case
            self.end()
            raise

    def gather(self, seconds: float) -> list[Any]:
        """The value of each rank, or the error that says why there is none."""
        answers: dict[int, tuple[bool, Any]] = {}
        failed: list[int] = []
        deadline = time.monotonic() + seconds
        while len(answers) < len(self.ranks):
            silent = {r.connection: r for r in self.ranks if r.rank not in answers}
            ready = wait(list(silent), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in (silent[c] for c in ready if isinstance(c, Connection)):
                answers[rank.rank] = rank.receive()
                if not answers[rank.rank][0] and not failed:
                    failed.append(rank.rank)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failed:
            raise self.rank_error(failed[0], answers)
        if len(answers) < len(self.ranks):
            late = [r.rank for r in self.ranks if r.rank not in answers]
            raise WorldTimeout(f"no answer from ranks {late} in {seconds:g} s{self.tails(late)}")
        return [answers[rank.rank][1] for rank in self.ranks]

    def rank_error(self, first: int, answers: dict[int, tuple[bool, Any]]) -> RankError:
        late = [r.rank for r in self.ranks if r.rank not in answers]
        lines = [f"rank {first} failed: {answers.pop(first)[1]}"]
        lines += [f"rank {rank} was still running {GRACE_SECONDS:g} s later" for rank in late]
        for rank, (returned, value) in answers.items():
            lines.append(f"rank {rank} {'returned' if returned else f'failed as well: {value}'}")
        return RankError("\n".join(lines) + self.tails(late))

    def tails(self, late: list[int]) -> str:
        """The output of all ranks; those in `late` add the stacks of their threads first."""
        for rank in self.ranks:
            if rank.rank in late and rank.process.poll() is None:
                rank.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5 if late else 0.0)  # faulthandler writes while Python is stuck
        return "\n".join(rank.tail() for rank in self.ranks)

    def leave(self) -> None:
        """Ask the ranks to destroy their process group and exit."""
        deadline = time.monotonic() + LEAVE_SECONDS
        try:
            for rank in self.ranks:
                rank.send(None)
            for rank in self.ranks:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # end() kills
        finally:
            self.end()

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()
        os.close(self.lifeline)
        del self.store
