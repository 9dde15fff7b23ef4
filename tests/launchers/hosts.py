"""Two hosts of this machine: namespaces with a name, an address and a cable between them.

They belong to a user namespace, so nothing of the machine's own network is touched, and they are
gone with the last process in them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from tests.launchers import processes

#: By name. The names are resolved on the two hosts only.
ADDRESSES = {"host-a": "10.0.0.1", "host-b": "10.0.0.2"}

#: Holds a host until its standard input is closed, which also the death of pytest does.
_HOLD = """
hostname {name}
mount --bind {names} /etc/hosts
ip link set lo up
echo up
exec cat
"""
_SEPARATE = ["unshare", "--net", "--uts", "--mount"]
_OWNED = [*_SEPARATE, "--user", "--map-root-user"]
_PROBE = "hostname probe; mount --bind /etc/hosts /etc/hosts; ip link add type veth"
_SECONDS = 10.0


def impossible() -> str:
    """Why this machine cannot be two hosts; "" if it can."""
    if missing := [name for name in ("unshare", "nsenter", "ip") if not shutil.which(name)]:
        return f"there is no {missing[0]}"
    command = [*_OWNED, "sh", "-ec", _PROBE]
    probe = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    return probe.stderr.strip() if probe.returncode else ""


class Host:
    """One host, up until it is ended."""

    def __init__(self, name: str, names: Path, separate: list[str]) -> None:
        self.name = name
        self._holder = subprocess.Popen(
            [*separate, "sh", "-ec", _HOLD.format(name=name, names=names)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.pid = self._holder.pid
        assert self._holder.stdout is not None
        if (said := self._holder.stdout.readline()) != b"up\n":
            self._holder.kill()
            raise OSError(f"{name}: {said.decode()}{self._holder.communicate()[0].decode()}")
        spaces = ["--user", "--net", "--uts", "--mount"]
        self._enter = ["nsenter", "--preserve-credentials", f"--target={self.pid}", *spaces]
        self._network = os.stat(f"/proc/{self.pid}/ns/net")

    def run_in(self, folder: Path) -> list[str]:
        """What runs another command there, in this folder."""
        return [*self._enter, "env", f"--chdir={folder}"]

    def do(self, *command: str) -> None:
        """Run a command there. Raises OSError with what it says if it fails."""
        words = [*self._enter, *command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

    def processes(self) -> list[psutil.Process]:
        """What runs on this host, whoever started it."""
        found = []
        for process in psutil.process_iter():
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{process.pid}/ns/net"), self._network):
                    found.append(process)
        return found

    def end(self) -> None:
        """Kill what runs there, and with it the host."""
        processes.end(self.processes)
        self._holder.communicate()


@contextmanager
def pair(folder: Path) -> Iterator[list[Host]]:
    """Two hosts that reach each other by name."""
    names = folder / "hosts"
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in ADDRESSES.items())]
    names.write_text("\n".join(lines) + "\n", encoding="utf-8")
    name_a, name_b = ADDRESSES
    hosts: list[Host] = []
    try:
        hosts.append(a := Host(name_a, names, _OWNED))
        inside = ["nsenter", "--preserve-credentials", f"--target={a.pid}", "--user"]
        hosts.append(b := Host(name_b, names, [*inside, *_SEPARATE]))
        a.do(*f"ip link add cable type veth peer name cable netns {b.pid}".split())
        for host in hosts:
            host.do("ip", "address", "add", f"{ADDRESSES[host.name]}/24", "dev", "cable")
            host.do("ip", "link", "set", "cable", "up")
        yield hosts
    finally:
        with ExitStack() as ending:
            for host in hosts:
                ending.callback(host.end)
