"""One process that trains a small model under ZeRO-3 and writes down what did not train.

    python -m ds_patches.traincheck.trial [--patched] [--compiled] RESULT

`doctor --train-check` runs it; see doctor.py. RESULT is a JSON file.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_patches.core import api
from ds_patches.doctor import trials
from ds_patches.runtime import engines
from ds_patches.runtime.device import accelerator
from ds_patches.traincheck import train_check

WIDTH, BATCH = 32, 4


class HalfSkipped(nn.Module):
    """Two layers, of which Dynamo skips one: its frame runs eagerly in a compiled model."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Linear(WIDTH, WIDTH)
        self.skipped = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.eagerly(torch.tanh(self.seen(x)))
        return out.square().mean()

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def eagerly(self, x: Tensor) -> Tensor:
        out: Tensor = self.skipped(x)
        return out


def main(arguments: Sequence[str]) -> int:
    """Write what came of it; an error of the training is a result too."""
    *options, path = arguments
    with trials.leaving(Path(path)) as result:
        if "--patched" in options:
            statuses = api.apply_all()
            result["live"] = [name for name, status in statuses.items() if status.live]
        _train("--compiled" in options, result)
    return 0


def _train(compiled: bool, result: dict[str, Any]) -> None:
    import deepspeed

    device = torch.device(accelerator().current_device_name())
    result |= {"device": device.type, "deepcompile": _deepcompile()}
    with tempfile.TemporaryDirectory() as folder:
        _begin(folder)
        torch.manual_seed(0)
        model = HalfSkipped().to(device)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
            config=_config(compiled),
        )
        if compiled and (why_not := _compile(engine)):
            result |= {"error": why_not, "deepcompile": why_not}
            return
        # The first one compiles, and is outside: a hook that comes later compiles nothing again.
        _step(engine, device)
        with train_check(engine, action="report") as report:
            for _ in range(2):
                _step(engine, device)
        dist.destroy_process_group()
    result["untrained"] = [one.name for one in (*report.untrained, *report.idle)]


def _compile(engine: Any) -> str:
    """Why DeepCompile is not on now. Some releases refuse, or leave it to torch.compile."""
    try:
        engine.compile()
    except Exception as error:
        return trials.first_line(error)
    left = "engine.compile() has left it to torch.compile"
    return "" if engines.is_deep_compiled(engine) else left


def _step(engine: Any, device: torch.device) -> None:
    engine.backward(engine(torch.randn(BATCH, WIDTH, device=device)))
    engine.step()


def _config(compiled: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **({"compile": {"deepcompile": True}} if compiled else {}),
    }


def _begin(folder: str) -> None:
    """Bring a process group of one up, without a port."""
    import deepspeed
    import deepspeed.ops

    with suppress(AttributeError):
        # On CPU, DeepSpeed builds this op for half a minute; without it, it takes gloo.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = accelerator().communication_backend_name()
    backend = "gloo" if backend == "ccl" else backend  # DeepSpeed's own of CPUs, to be built too
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False)


def _deepcompile() -> str:
    """Return why DeepCompile cannot run here, or nothing if it can."""
    try:
        from deepspeed.compile.util import is_deepcompile_supported
    except ImportError:
        return "this DeepSpeed has none"
    here = f"{accelerator().device_name()} and torch {torch.__version__}"
    return "" if is_deepcompile_supported() else f"this DeepSpeed has none for {here}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
