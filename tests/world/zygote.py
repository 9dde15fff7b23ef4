"""Ranks that are forks of a process which has imported what every rank imports: a fork server.

What a rank imports until its first engine is built takes 8 s of a core, a fork of it a few
milliseconds. What forked ranks cannot show is a set that has another order on each: they share the
seed of their hashes and their addresses. So `make test` forks, and `make test-all` does not.
"""

import multiprocessing
import os
import subprocess
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from typing import Any
from unittest.mock import patch

#: DeepSpeed, and most of what its first engine imports.
IMPORTS = ["deepspeed", "deepspeed.ops", "functorch.compile", "torch._inductor.compile_fx"]
#: No fork can use CUDA after its parent has, and some releases look for GPUs when imported.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def serve(environment: Mapping[str, str]) -> None:
    """Start the one server that a process may have."""
    forkserver.set_forkserver_preload(["tests.world.rank", *IMPORTS])
    with patch.dict(os.environ, {**environment, **NO_GPU}, clear=True):
        forkserver.ensure_running()


class File:
    """An open file, on its way to a rank."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.number),)


def _received(duplicate: Any) -> int:
    return int(duplicate.detach())


class Forked:
    """A rank that was forked, used as a `subprocess.Popen` is."""

    def __init__(self, environment: Mapping[str, str], *files: int) -> None:
        context = multiprocessing.get_context("forkserver")
        words = (environment, *map(File, files))
        self._process = context.Process(target=_become, args=words, daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _become(environment: Mapping[str, str], cases: int, lifeline: int, output: int) -> None:
    """A process of its own, as one that was started."""
    multiprocessing.current_process().daemon = False  # it may have children
    os.setsid()  # what it starts dies with it
    for standard in (1, 2):
        os.dup2(output, standard)
    os.environ.clear()
    os.environ.update(environment)
    from tests.world import rank

    rank.main(cases, lifeline)
