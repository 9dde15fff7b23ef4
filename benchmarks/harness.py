"""Options, ranks, engines, and rows that take turns, for all benchmarks.

Rows that are compared take turns in short blocks, and the order turns around with each round:
A B C, C B A, A B C ... So a slow minute of the machine meets all of them. Patches are applied for a
block and taken back after it. The first row is what the others are divided by, round by round; all
rounds are printed.
"""

import argparse
import gc
import logging
import math
import os
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16
SEED = 1234
HEADER = ("what", "row", "median", "95 %", "all rounds", "peak MiB", "MiB after")
# A rank that waits longer has lost the others: end with a message, not at a job's time limit.
_PATIENCE = timedelta(minutes=2)
# Real updates, but so small that the weights hardly change over some hundred steps.
_LEARNING_RATE = 1e-6


@dataclass
class Row:
    """`step`, with `patches` applied. `ms`: the median step of each round; `error`: in its place.

    `patches`: names, or "all". `peak`: MiB, the most of any round; `after`: MiB between two steps.
    """

    name: str
    step: Callable[[], object]
    patches: Sequence[str] = ()
    ms: list[float] = field(default_factory=list)
    peak: float = 0.0
    after: float = 0.0
    error: str = ""


def options(doc: str | None, gpu: dict[str, Any], **cpu: Any) -> argparse.Namespace:
    """Options and their defaults; `cpu`: other ones where there is no GPU."""
    parser = argparse.ArgumentParser(description=doc)
    for name, value in (gpu if ON_GPU else gpu | cpu).items():
        many = isinstance(value, list)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(value[0] if many else value),
            nargs="+" if many else None,
            default=value,
            help=f"default: {value}",
        )
    return parser.parse_args()


def start(of: argparse.Namespace) -> torch.device:
    """Bring this rank up, and begin what is printed."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start it with torchrun --nproc-per-node 2 -m benchmarks.NAME")
    if not ON_GPU:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops

    # On CPU it would build a shared-memory all-reduce with g++; this table is its own switch.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Patches come and go with every block: what applying has to note is no news here.
    logging.getLogger("ds_patches").setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that newer torch deprecates, with a warning per call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    deepspeed.init_distributed("nccl" if ON_GPU else "gloo", timeout=_PATIENCE)
    head(of)
    return device


def head(of: argparse.Namespace) -> None:
    """Print what a reader needs to judge the numbers: date, machine, versions, commit, options."""
    import deepspeed

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if ON_GPU else "-"  # type: ignore[no-untyped-call]
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    device = torch.cuda.get_device_name() if ON_GPU else "CPU, whose times mean nothing"
    ranks = dist.get_world_size() if dist.is_initialized() else 2
    say(
        f"{date.today()}, {ranks} x {device}, DeepSpeed {deepspeed.__version__}, torch "
        f"{torch.__version__}, NCCL {nccl}, Python {platform.python_version()}, commit {commit}, "
        f"{ {k: v for k, v in os.environ.items() if k.startswith('NCCL_')} }, {vars(of)}\n"
    )
    say(f"{line(HEADER)}\n{line(['---'] * len(HEADER))}")


def compare(what: str, rows: Sequence[Row], of: argparse.Namespace, device: torch.device) -> None:
    """Measure the rows in turns, and print them."""
    turn = list(rows)
    rows[0].step()
    # To apply patches makes garbage: its collection, of all that there is, would fall into a row.
    gc.collect()
    gc.freeze()
    for _ in range(of.rounds):
        for row in turn:
            with applied(row.patches):
                gc.collect()  # of what applying has left, and the row before
                measure(row, of, device)
        turn.reverse()
    show(what, rows)


def measure(row: Row, of: argparse.Namespace, device: torch.device) -> None:
    """One block. A step counts as its slowest rank took it: the others wait for that one."""
    for _ in range(of.warmup):
        row.step()
    if ON_GPU:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    marks = [_mark()]
    for _ in range(of.steps):
        row.step()
        marks.append(_mark())
    if ON_GPU:
        torch.cuda.synchronize(device)
        # With memory that was given up and that a stream has still to get done with.
        peak = torch.cuda.memory_stats(device)["active_bytes.all.peak"] / 2**20
        row.peak = max(row.peak, peak)
        row.after = max(row.after, torch.cuda.memory_allocated(device) / 2**20)
    ms = torch.tensor(
        [a.elapsed_time(b) if ON_GPU else 1e3 * (b - a) for a, b in pairwise(marks)], device=device
    )
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    row.ms.append(statistics.median(ms.tolist()))


def show(what: str, rows: Sequence[Row]) -> None:
    """The first row's milliseconds, and of the others the ratios to it."""
    first = rows[0]
    for row in rows:
        if row is first:
            values, unit = row.ms, "{:.2f} ms"
        else:
            values, unit = [ms / base for ms, base in zip(row.ms, first.ms, strict=False)], "{:.3f}"
        median = unit.format(statistics.median(values)) if values else "-"
        rounds = " ".join(f"{value:.3f}" for value in values)
        memory = [f"{mib:.0f}" for mib in (row.peak, row.after)]
        cells = [row.error or median, interval(values), rounds, *memory]
        say(line([what, row.name, *cells]))


def interval(values: Sequence[float]) -> str:
    """Where the median of all such rounds lies, in at least 95 of 100 tables; "-" of few rounds.

    Between two of the rounds, as far from the ends as the binomial distribution allows: nothing is
    assumed of how a machine's times scatter.
    """
    rounds, beyond, place = len(values), 0.0, 0
    while 2 * (beyond := beyond + math.comb(rounds, place) / 2**rounds) <= 0.05:
        place += 1
    ordered = sorted(values)
    return f"{ordered[place - 1]:.3f} to {ordered[-place]:.3f}" if place else "-"


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def say(text: str) -> None:
    """Print on one rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


@contextmanager
def applied(names: Sequence[str]) -> Iterator[None]:
    """These patches inside, none outside; "all": what `apply_all` applies."""
    import ds_patches

    if live := [name for name in ds_patches.names() if ds_patches.is_applied(name)]:
        raise RuntimeError(f"applied already: {', '.join(live)}")
    if "all" in names:
        ds_patches.apply_all()
    for name in {*names} - {"all"}:
        ds_patches.apply(name)  # raises if it is not live
    try:
        yield
    finally:
        ds_patches.unapply_all()


def mlp(layers: int, width: int, device: torch.device) -> nn.Sequential:
    """`layers` times Linear(`width`, bias=False) + ReLU: the same weights at every call."""
    torch.manual_seed(SEED)
    chain = nn.Sequential()
    for _ in range(layers):
        linear = nn.Linear(width, width, bias=False, device=device, dtype=DTYPE)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        chain.extend([linear, nn.ReLU()])
    return chain


def batches(count: int, rows: int, width: int, device: torch.device) -> list[Tensor]:
    """This rank's, each [rows, width]; every rank has its own."""
    made, shape = _of_this_rank(device), (rows, width)
    return [torch.randn(shape, generator=made, dtype=DTYPE, device=device) for _ in range(count)]


def tokens(count: int, length: int, words: int, device: torch.device) -> list[Tensor]:
    """This rank's, each int64 [1, length]; every rank has its own."""
    made, shape = _of_this_rank(device), (1, length)
    return [torch.randint(words, shape, generator=made, device=device) for _ in range(count)]


def _of_this_rank(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(SEED + 1 + dist.get_rank())


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.float().pow(2).mean()


def config(batch: int, micro_steps: int = 1, **zero_optimization: Any) -> dict[str, Any]:
    """DeepSpeed's configuration, with all whose default has changed between releases."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "stage3_param_persistence_threshold": 0,
            **zero_optimization,
        },
    }


@contextmanager
def engine(model: nn.Module, settings: dict[str, Any]) -> Iterator[Any]:
    """A ``DeepSpeedEngine`` with AdamW, of which nothing is left afterwards."""
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    made, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    try:
        yield made
    finally:
        made.destroy()
        # DeepSpeed's caches keep a destroyed engine alive. Its tensors need not stay with it.
        for holder in (*model.parameters(), made.optimizer):
            vars(holder).clear()
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


def _mark() -> Any:
    """Now: of a GPU as an event, for which nothing waits that would not wait in training."""
    if not ON_GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
