"""A pytest plugin for DeepSpeed's own unit tests: which are run, and what became of each.

On CPU it is imported in the fork server of their ranks, too, which then has DeepSpeed for all.
"""

import json
import multiprocessing
import os
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.ops
import torch._dynamo  # noqa: F401  # which every optimizer imports, for seconds
from deepspeed.accelerator import get_accelerator
from torch.nn.parallel import DistributedDataParallel

#: A file: a line for each test that began, and another one for its outcome and message.
LOG = Path(os.environ["JUDGED_LOG"])
SAMPLE, SALT = int(os.environ["JUDGED_SAMPLE"]), os.environ["JUDGED_SALT"]


def _adam(_: int, flag: Any, tensors: Any, *settings: Any) -> None:
    """Compute a step of FusedAdam."""
    lr, beta1, beta2, eps, step, is_decoupled, corrects, decay = settings
    first, two = (1 - beta1**step, 1 - beta2**step) if corrects else (1, 1)
    for grad, param, mean, square in zip(*tensors, strict=True):
        gradient = grad.float() if is_decoupled else grad.float() + decay * param.float()
        mean.lerp_(gradient.to(mean.dtype), 1 - beta1)
        square.lerp_(gradient.square().to(square.dtype), 1 - beta2)
        update = mean / first / ((square / two).sqrt() + eps)
        param.sub_(lr * (update + decay * param if is_decoupled else update))


def _load(builder: Any, *_: Any) -> Any:
    if "fused" in type(builder).__name__.lower():
        return SimpleNamespace(multi_tensor_adam=_adam)
    raise ImportError(f"{type(builder).__name__} is not built")


def _wrap(model: Any, *arguments: Any, device_ids: Any = None, output_device: Any = None) -> None:
    """Wrap as DistributedDataParallel does on a CPU, which has no such devices."""
    _wrapped(model, *arguments)


_wrapped = DistributedDataParallel.__init__
if get_accelerator().device_name() == "cpu":
    DistributedDataParallel.__init__ = _wrap
    # Nothing is compiled: it takes minutes, and a test that is ended meanwhile locks the others.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for name in ("FusedAdamBuilder", "CPUAdamBuilder"):
        type(get_accelerator().create_op_builder(name)).load = _load
    multiprocessing.set_forkserver_preload([__name__])
else:  # older releases initialize CUDA at their import, and a fork cannot use it then
    multiprocessing.set_forkserver_preload(["torch._dynamo"])


def _note(name: str, outcome: str, message: str = "") -> None:
    with LOG.open("a", encoding="utf-8") as log:
        log.write(json.dumps([name, outcome, message]) + "\n")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave as many as are wanted, always the same, without those that an earlier run began."""
    lines = LOG.read_text("utf-8").splitlines() if LOG.exists() else []
    began = {json.loads(line)[0] for line in lines}
    ranked = sorted(items, key=lambda item: sha256(f"{SALT} {item.nodeid}".encode()).digest())
    chosen = {item.nodeid for item in ranked[: SAMPLE or None]} - began
    items[:] = [item for item in items if item.nodeid in chosen]


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(nodeid, "hung")  # unless another line follows


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        _note(report.nodeid, report.outcome, (crash.message if crash else "")[:300])
