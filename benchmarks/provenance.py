"""Where numbers come from: versions, hardware, date, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]


def provenance(device: torch.device, commit: str | None) -> dict[str, str]:
    """What a reader needs in order to judge the numbers, or to run them again."""
    import deepspeed

    import ds_patches

    on_gpu = device.type == "cuda"
    nccl = torch.cuda.nccl.version() if on_gpu else ()  # type: ignore[no-untyped-call]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _git_commit(),
        "ds_patches": ds_patches.__version__,
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, nccl)) or "none",
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if on_gpu else _cpu(),
        **_nccl_settings(),
        **(_group() if dist.is_initialized() else {}),
    }


def p2p(origin: Mapping[str, str]) -> bool:
    """Whether the GPUs of a run could copy directly between each other."""
    return origin.get("NCCL_P2P_DISABLE", "0") in ("", "0")


def sentence(origin: Mapping[str, str]) -> str:
    """A run's date, machine and versions."""
    if not origin:
        return "It was not kept where this ran."
    of = origin.get
    return (
        f"{of('date', '-')[:10]}, {of('ranks', '-')} x {of('device', '-')}, "
        f"DeepSpeed {of('deepspeed', '-')}, torch {of('torch', '-')}, NCCL {of('nccl', '-')}, "
        f"Python {of('python', '-')}, commit {of('commit', '-')}."
    )


def _group() -> dict[str, str]:
    return {"ranks": str(dist.get_world_size()), "backend": dist.get_backend()}


def _nccl_settings() -> dict[str, str]:
    """How the caller set NCCL: NCCL_P2P_DISABLE=1 stands for machines without NVLink."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}


def _cpu() -> str:
    """The processor's name, as Linux knows it, and how many this process may use."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU ({names[0] if names else platform.machine()}, {os.cpu_count()} cores)"


def _git_commit() -> str:
    """The commit of this checkout, marked if it was edited since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
