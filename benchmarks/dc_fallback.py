"""DeepCompile and frames that Dynamo skips: ``python -m benchmarks.dc_fallback``, without torchrun.

Eager ZeRO-3, stock DeepCompile and patched DeepCompile, while Dynamo skips nothing, half of the
layers or the whole forward. DeepCompile keeps hooks and compiled code for the whole process, so
each row has processes of its own. They live at once and take turns. "again": stock again, as a
process is faster or slower than its like for all of its life.

Beside each row stand the loss of its last step, as stock does not train what a skipped frame holds,
and how many graphs Dynamo has compiled, and how often it broke one off.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import DTYPE, SEED, Row, applied, config, measure, options, say, start

OPTIONS = {
    "modes": ["eager", "stock", "patched", "again"],
    "skipped": ["nothing", "half", "all"],
    "layers": 8,
    "width": 2048,
    "words": 4096,
    "batch": 4,
    "tokens": 512,
    "first": 15,  # steps at the start of a life; DeepCompile compiles at steps 0 and 5
    "warmup": 3,
    "steps": 20,
    "rounds": 7,
    "seconds": 200,  # that a row may take to come to life
}
RANKS = 2


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
    """The one row that was asked for, on this rank; it takes a turn for each line of its input."""
    import deepspeed
    from torch._dynamo.utils import counters

    device, (mode,), (skipped,) = start(of), of.modes, of.skipped
    made = torch.Generator(device).manual_seed(SEED + 1 + dist.get_rank())
    shape = (2, of.batch, of.tokens)
    tokens, targets = torch.randint(of.words, shape, generator=made, device=device)
    torch.manual_seed(SEED)
    sys.stdin.readline()
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

        for _ in range(of.first):
            step()
        say("alive")
        row = Row(mode, step)
        for _ in iter(sys.stdin.readline, ""):
            measure(row, of, device)
            graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"].total()
            say(f"measured {row.ms[-1]} {row.peak} {losses[0].item()} {graphs} {breaks}")
    dist.destroy_process_group()


class Life:
    """The ranks of one row."""

    def __init__(self, mode: str, skipped: str, of: argparse.Namespace) -> None:
        self._seconds = of.seconds
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        asked = "stock" if mode == "again" else mode
        arguments = [*sys.argv[1:], "--modes", asked, "--skipped", skipped]
        # DeepSpeed's builder asks the GPU what it is where this is not set.
        clean = {k: v for k, v in os.environ.items() if k != "TORCH_CUDA_ARCH_LIST"}
        clean |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.dc_fallback", *arguments],
                env=clean | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank in range(RANKS)
        ]

    def ask(self, answer: str) -> str:
        """Tell the ranks to go on; return the line that begins with `answer`, without `answer`.

        Raises RuntimeError if they end, or take too long.
        """
        lines = []
        timer = threading.Timer(self._seconds, self.end)
        timer.start()
        try:
            for rank in self._ranks:
                assert rank.stdin is not None
                rank.stdin.write("\n")
                rank.stdin.flush()
            assert self._ranks[0].stdout is not None
            for line in self._ranks[0].stdout:
                if line.startswith(answer):
                    return line.removeprefix(answer)
                lines.append(line)
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        errors = re.findall(r"\b\w+Error: .*", "".join(lines))
        raise RuntimeError([*errors, "it ended"][0].replace("|", "/")[:160])

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()


def live(rows: Sequence[Row], skipped: str, of: argparse.Namespace) -> None:
    """All rows, in turns."""
    names = [row.name.partition(",")[0] for row in rows]
    turn = [(row, name, Life(name, skipped, of)) for row, name in zip(rows, names, strict=True)]
    try:
        # One after the other: DeepCompile decides by what it measures as it compiles.
        for row, _, life in turn:
            act(row, life, "alive")
        for _ in range(of.rounds):
            for row, name, life in turn:
                if not row.error:
                    act(row, life, "measured ", name)
            turn.reverse()
    finally:
        for _, _, life in turn:
            life.end()


def act(row: Row, life: Life, answer: str, name: str = "") -> None:
    try:
        numbers = life.ask(answer)
    except RuntimeError as error:
        row.error = str(error)
        return
    if name:
        ms, peak, loss, graphs, breaks = map(float, numbers.split())
        row.ms.append(ms)
        row.peak = max(row.peak, peak)
        row.name = f"{name}, loss {loss:.4f}, {graphs:.0f} graphs, {breaks:.0f} breaks"


def main() -> None:
    small = {"modes": ["eager"], "layers": 2, "width": 32, "words": 64, "tokens": 8}
    of = options(__doc__, OPTIONS, **small, warmup=2, steps=2, rounds=1)
    if "LOCAL_RANK" in os.environ:
        train(of)
        return
    harness.head(of)
    for skipped in of.skipped:
        rows = [Row(mode, lambda: None) for mode in of.modes]
        live(rows, skipped, of)
        harness.show(f"{skipped} skipped", rows)


if __name__ == "__main__":
    main()
