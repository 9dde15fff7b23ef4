"""DeepCompile and frames that Dynamo skips: ``python -m benchmarks.dc_fallback``, without torchrun.

Eager ZeRO-3, stock DeepCompile and patched DeepCompile, while Dynamo skips nothing, half of the
layers or the whole forward. DeepCompile keeps hooks and compiled code for the whole process, so
each row of each round runs in processes of its own. Without a GPU there is eager alone.

The loss of the last step stands beside each row: stock does not train what a skipped frame holds.
Whether gradients are right is the question of tests/gpu.
"""

import argparse
import os
import re
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import (
    DTYPE,
    SEED,
    Row,
    applied,
    config,
    head,
    measure,
    options,
    say,
    show,
    start,
)

OPTIONS = {
    "modes": ["eager", "stock", "patched"],
    "skipped": ["nothing", "half", "all"],
    "layers": 8,
    "width": 2048,
    "words": 4096,
    "batch": 4,
    "tokens": 512,
    "warmup": 10,  # DeepCompile compiles at steps 0 and 5
    "steps": 40,
    "rounds": 3,
    "seconds": 300,  # that a row may take
}


class Model(nn.Module):
    """Embedding, `layers` x (Linear + ReLU) and a head; its forward returns the loss."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers[: len(self.layers) // 2]:
            hidden = torch.relu(layer(hidden))
        hidden = self.upper(hidden)
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())

    def upper(self, hidden: Tensor) -> Tensor:
        for layer in self.layers[len(self.layers) // 2 :]:
            hidden = torch.relu(layer(hidden))
        return hidden


class HalfSkipped(Model):
    upper = torch.compiler.disable(Model.upper)


class AllSkipped(Model):
    forward = torch.compiler.disable(Model.forward)


MODELS = {"nothing": Model, "half": HalfSkipped, "all": AllSkipped}


def train(of: argparse.Namespace) -> None:
    """The one row that was asked for, on this rank."""
    import deepspeed

    device, (mode,), (skipped,) = start(of), of.modes, of.skipped
    made = torch.Generator(device).manual_seed(SEED + 1 + dist.get_rank())
    shape = (2, of.batch, of.tokens)
    tokens, targets = torch.randint(of.words, shape, generator=made, device=device)
    torch.manual_seed(SEED)
    with device:
        model = MODELS[skipped](of.layers, of.width, of.words).to(DTYPE)
    # DeepSpeed's default of 1 GB is more than all the rest of this model takes.
    settings = config(of.batch, stage=3, reduce_bucket_size=of.width * max(of.width, of.words))
    settings |= {"compile": {"deepcompile": True}} if mode != "eager" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    losses: list[Tensor] = []
    with applied(["dc_fallback"] if mode == "patched" else []):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        if mode != "eager":
            engine.compile()

        def step() -> None:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            losses[:] = [loss.detach()]

        row = Row(mode, step)
        measure(row, of, device)
    say(f"measured {row.ms[0]} {row.peak} {losses[0].item()}")
    dist.destroy_process_group()


def in_processes(row: Row, skipped: str, of: argparse.Namespace) -> None:
    """One round of a row, which takes what came of it."""
    mode = row.name.partition(",")[0]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.dc_fallback", *sys.argv[1:], "--modes", mode]
    # DeepSpeed's builder asks the GPU what it is where this is not set.
    clean = {name: value for name, value in os.environ.items() if name != "TORCH_CUDA_ARCH_LIST"}
    with subprocess.Popen(
        [*command, "--skipped", skipped],
        env=clean,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            said, _ = process.communicate(timeout=of.seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun takes its ranks along
            row.error = f"not done after {of.seconds} s"
            return
    if found := re.search(r"^measured (\S+) (\S+) (\S+)$", said, re.MULTILINE):
        ms, peak, loss = map(float, found.groups())
        row.ms.append(ms)
        row.peak = max(row.peak, peak)
        row.name = f"{mode}, loss {loss:.4f}"
        return
    errors = re.findall(r"\b\w+Error: .*", said)
    row.error = [*errors, f"exit code {process.returncode}"][0].replace("|", "/")[:160]


def main() -> None:
    small = {"modes": ["eager"], "layers": 2, "width": 32, "words": 64, "tokens": 8}
    of = options(__doc__, OPTIONS, **small, warmup=2, steps=2, rounds=1)
    if "LOCAL_RANK" in os.environ:
        train(of)
        return
    head(of)
    for skipped in of.skipped:
        rows = [Row(mode, lambda: None) for mode in of.modes]
        turn = list(rows)
        for _ in range(of.rounds):
            for row in turn:
                if not row.error:  # what failed is not started again
                    in_processes(row, skipped, of)
            turn.reverse()
        show(f"{skipped} skipped", rows)


if __name__ == "__main__":
    main()
