"""A process that has imported what every rank imports, and forks the ranks.

What a rank imports until its first engine is built takes 8 s of a core, a fork of it a few
milliseconds. What forked ranks cannot show is a set that has another order on each: they share the
seed of their hashes and their addresses. So `make test` forks, and `make test-all` does not.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path

#: A rank's pid and, in the end, its exit code, from whoever waits for it.
_STATUS = struct.Struct("q")
_LARGEST = 2**17  # a request: the environment
#: DeepSpeed, and most of what its first engine imports.
IMPORTS = ("deepspeed", "deepspeed.ops", "functorch.compile", "torch._inductor.compile_fx")


class Forked:
    """A rank that was forked, used as a `subprocess.Popen` is."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._code: int | None = None
        self.pid = self._read()

    def _read(self) -> int:
        told = os.read(self._status, _STATUS.size)
        return int(_STATUS.unpack(told)[0]) if told else -signal.SIGKILL

    def poll(self) -> int | None:
        if self._code is None and select.select([self._status], [], [], 0)[0]:
            self._code = self._read()
            os.close(self._status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            select.select([self._status], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Zygote:
    """The process, seen from pytest; it ends with pytest's end of the socket."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main({theirs.fileno()})"],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def fork(self, environment: dict[str, str], cases: int, lifeline: int, output: int) -> Forked:
        """Fork a rank that has these files; raises EOFError when it could not import."""
        reading, writing = os.pipe()
        try:
            files = [cases, lifeline, output, writing]
            socket.send_fds(self._socket, [pickle.dumps(environment)], files)
        except BrokenPipeError:
            os.close(reading)
            raise EOFError("the zygote is gone, and said above why") from None
        finally:
            os.close(writing)
        return Forked(reading)


def serve(connection: socket.socket) -> None:
    """Fork a rank for each request, until nobody can make one."""
    while True:
        request, files, _, _ = socket.recv_fds(connection, _LARGEST, 4)
        if not request:
            return
        cases, lifeline, output, status = files
        if not os.fork():
            connection.close()
            _guard(pickle.loads(request), cases, lifeline, output, status)
        for file in files:
            os.close(file)


def _guard(
    environment: dict[str, str], cases: int, lifeline: int, output: int, status: int
) -> None:
    """Fork the rank, wait for it, and tell how it ended: pytest is not its parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if not pid:
        os.close(status)
        _become(environment, output)
        _run(cases, lifeline)
    os.write(status, _STATUS.pack(pid))
    for file in (cases, lifeline, output):  # or their other ends never see the rank's end
        os.close(file)
    _, ended = os.waitpid(pid, 0)
    os.write(status, _STATUS.pack(os.waitstatus_to_exitcode(ended)))
    os._exit(0)


def _become(environment: dict[str, str], output: int) -> None:
    """A process of its own, as one that was started."""
    os.setsid()  # what it starts dies with it
    for standard in (1, 2):
        os.dup2(output, standard)
    os.environ.clear()
    os.environ.update(environment)


def _run(cases: int, lifeline: int) -> None:
    from tests.world import rank

    try:
        rank.main(cases, lifeline)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def main(connection: int) -> None:
    """Import, and fork ranks for whoever has the other end of this socket."""
    for module in IMPORTS:
        import_module(module)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads, which a fork would not have"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    serve(socket.socket(fileno=connection))
