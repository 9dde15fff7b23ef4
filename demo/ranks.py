"""The rank processes: start them, hand on what they report, end them."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

from demo.events import Event, Failed, Finished

RANKS = 2
_ROOT = Path(__file__).resolve().parents[1]
_SILENCE_SECONDS = 180.0  # covers two imports of DeepSpeed on a busy machine
_GRACE_SECONDS = 10.0  # what a rank gets once another has failed, and what it may take to exit
_TAIL_LINES = 25


class RankLost(Exception):
    """A rank died, hung or did not leave; the message holds its last words."""


def events(side: str, epochs: int, seed: int) -> Generator[Event, None, None]:
    """Run the ranks and yield what they report, in the order in which it comes.

    side: "stock" or "patched". Ends when all ranks have finished and exited, or when one has failed
    and the others had their time to. Raises RankLost if one is silent, dies or does not exit.
    Closing the generator ends the ranks.
    """
    port = _free_port()
    arrived: queue.Queue[tuple[Rank, Event | None]] = queue.Queue()
    ranks: list[Rank] = []
    try:
        for number in range(RANKS):
            ranks.append(Rank(number, port, [side, str(epochs), str(seed)]))
            threading.Thread(target=ranks[-1].listen, args=(arrived,), daemon=True).start()
        yield from _until_silent(ranks, arrived)
    finally:
        for rank in ranks:
            rank.end()


def _until_silent(
    ranks: list[Rank], arrived: queue.Queue[tuple[Rank, Event | None]]
) -> Iterator[Event]:
    speaking = list(ranks)
    failed = False
    while speaking:
        try:
            rank, event = arrived.get(timeout=_GRACE_SECONDS if failed else _SILENCE_SECONDS)
        except queue.Empty:
            if failed:
                return  # it waits in a collective for the rank that failed
            raise RankLost(speaking[0].lost("says nothing")) from None
        if event is not None:
            rank.last = event
            failed |= isinstance(event, Failed)
            yield event
            continue
        speaking.remove(rank)
        if not failed:
            rank.leave()


class Rank:
    """One rank process and the nameless file with all it printed."""

    def __init__(self, number: int, port: int, arguments: list[str]) -> None:
        self.number = number
        self.last: Event | None = None
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "demo.rank", *arguments],
            cwd=_ROOT,
            env=_environment(number, port),
            stdin=subprocess.PIPE,  # never written: its end tells the rank that we are gone
            stdout=subprocess.PIPE,
            stderr=self._printed,
            start_new_session=True,  # Ctrl-C is ours; what a rank starts dies with it
        )

    def listen(self, arrived: queue.Queue[tuple[Rank, Event | None]]) -> None:
        """Put every event into `arrived`, and None when no more will come."""
        assert self._process.stdout is not None
        try:
            while True:
                arrived.put((self, pickle.load(self._process.stdout)))
        except (EOFError, pickle.UnpicklingError):
            arrived.put((self, None))

    def leave(self) -> None:
        """Wait until the process is gone; raises RankLost if it did not finish and go in peace."""
        try:
            code = self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            raise RankLost(self.lost("does not exit")) from None
        if code != 0 or not isinstance(self.last, Finished):
            raise RankLost(self.lost(f"exited with code {code}"))

    def lost(self, how: str) -> str:
        """What became of it, and the last lines it printed."""
        size = os.fstat(self._printed.fileno()).st_size
        lines = os.pread(self._printed.fileno(), size, 0).decode(errors="replace").splitlines()
        return "\n".join([f"rank {self.number} {how}; it printed last:", *lines[-_TAIL_LINES:]])

    def end(self) -> None:
        """Kill it if it still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._printed.close()


def _environment(number: int, port: int) -> dict[str, str]:
    return os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(RANKS),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
