"""A pytest plugin for DeepSpeed's own unit tests: which are run, and what became of each.

It is imported in the fork server of their ranks, too, which then has DeepSpeed for all of them.
"""

import json
import multiprocessing
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import deepspeed.ops
import torch._dynamo  # noqa: F401  # which every optimizer imports, for seconds

#: A file: a line for each test that began, and another one for its outcome and message.
LOG = Path(os.environ["JUDGED_LOG"])
SAMPLE, SALT = int(os.environ["JUDGED_SAMPLE"]), os.environ["JUDGED_SALT"]

# It serves tensor parallelism in inference, and takes half a minute to compile.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
multiprocessing.set_forkserver_preload([__name__])


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
