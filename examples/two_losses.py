"""Two losses over one ZeRO-3 forward, stock and patched: `python -m examples.two_losses`.

Two gloo ranks train a shared trunk with two heads on scikit-learn's handwritten digits: which digit
is it, and what did it look like? First without ds_patches, then with it. The exit code is 0 only if
the patched run trained, its gradients are PyTorch's and no parameter stayed gathered.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import textwrap
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from examples import digits, ranks

BATCH, TEST_IMAGES = 32, 360  # a batch of one rank
PIXELS, WIDTH, CODE = digits.SIDE**2, 96, 32
ROUNDING = 1e-5  # float32, two ranks, sums in another order
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,  # partition the smallest parameter too
        "reduce_bucket_size": 1_000_000,
    },
}


class TwoHeads(nn.Module):
    """Images (batch, 64) to logits (batch, 10) and pixels (batch, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *(nn.Linear(PIXELS, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)),
            *(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)),
            nn.Linear(WIDTH, CODE),
        )
        self.digit = nn.Linear(CODE, digits.CLASSES)
        self.pixels = nn.Sequential(nn.Linear(CODE, WIDTH), nn.GELU(), nn.Linear(WIDTH, PIXELS))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        code = self.trunk(images)
        return self.digit(code), self.pixels(code)


digit_loss, pixel_loss = functional.cross_entropy, functional.mse_loss


@dataclass
class Outcome:
    """What one rank came to, or all of them.

    losses: both, of the test images, before training and after each epoch. gathered: the most
    parameters that a first and a second backward left gathered. differences: to PyTorch's gradient,
    relative to the largest entry.
    """

    error: str = ""
    losses: list[tuple[float, float]] = field(default_factory=list)
    accuracy: float = 0.0
    differences: list[float] = field(default_factory=list)
    gathered: list[int] = field(default_factory=lambda: [0, 0])
    finished: bool = False

    def trained(self) -> bool:
        """Whether all epochs ran, both losses fell and most test images are read rightly."""
        if not self.finished:
            return False
        pairs = zip(self.losses[0], self.losses[-1], strict=True)
        return all(last < first for first, last in pairs) and self.accuracy > 0.5

    def faults(self) -> list[str]:
        found = {
            f"it did not train {self.error}": not self.trained(),
            # NaN too
            "its gradients are not PyTorch's": not all(d <= ROUNDING for d in self.differences),
            "parameters stay gathered after a backward": any(self.gathered),
        }
        return [fault for fault, is_one in found.items() if is_one]

    def column(self) -> dict[str, str]:
        """Of the table."""
        trained = self.trained()
        return {
            "trains": "yes" if trained else "no",
            "error": textwrap.shorten(self.error, 38, placeholder="...") or "none",
            "gradient difference to PyTorch": (
                f"{max(self.differences):.1e}" if self.differences else "-"
            ),
            "gathered after retained backward": str(self.gathered[0]),
            "test accuracy": f"{self.accuracy:.1%}" if trained else "-",
        }


def step(engine: Any, plain: TwoHeads, images: Tensor, labels: Tensor, found: Outcome) -> None:
    """One forward, two backwards, one step. A partitioned parameter has an empty tensor."""
    params = list(engine.module.parameters())
    logits, pixels = engine(images)
    engine.backward(digit_loss(logits, labels), retain_graph=True)
    found.gathered[0] = max(found.gathered[0], sum(p.numel() > 0 for p in params))
    engine.backward(pixel_loss(pixels, images))
    found.gathered[1] = max(found.gathered[1], sum(p.numel() > 0 for p in params))
    found.differences.append(difference(engine, plain, images, labels))
    engine.step()


def difference(engine: Any, plain: TwoHeads, images: Tensor, labels: Tensor) -> float:
    """The largest to plain PyTorch's gradient from the same weights, relative to the largest entry.

    PyTorch's is averaged over the ranks, as data parallel training does. NaN if any is.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    pairs = list(zip(engine.module.parameters(), plain.parameters(), strict=True))
    for partitioned, mine in pairs:
        with deepspeed.zero.GatheredParameters([partitioned]), torch.no_grad():
            mine.copy_(partitioned)
    plain.zero_grad()
    logits, pixels = plain(images)
    (digit_loss(logits, labels) + pixel_loss(pixels, images)).backward()
    worst, largest = torch.zeros(()), torch.zeros(())
    for partitioned, mine in pairs:
        dist.all_reduce(mine.grad)
        mine.grad /= dist.get_world_size()
        worst = torch.maximum(worst, (safe_get_full_grad(partitioned) - mine.grad).abs().max())
        largest = torch.maximum(largest, mine.grad.abs().max())
    return float(worst / largest)


def train(epochs: int, seed: int, found: Outcome, shown: TextIO) -> None:
    """Stock or patched, this is the same."""
    import deepspeed

    torch.manual_seed(seed)  # alike on all ranks
    plain = TwoHeads()
    model = deepcopy(plain)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    images, labels = digits.load()
    images = images.flatten(1)
    held_out, others = torch.randperm(len(labels)).tensor_split([TEST_IMAGES])

    def test(model: Any, epoch: int) -> None:
        with torch.no_grad():
            logits, pixels = model(images[held_out])
        losses = digit_loss(logits, labels[held_out]), pixel_loss(pixels, images[held_out])
        first, second = (loss.item() for loss in losses)
        found.losses.append((first, second))
        found.accuracy = (logits.argmax(1) == labels[held_out]).float().mean().item()
        print(f"{epoch:>8}{first:>13.4f}{second:>13.4f}{found.accuracy:>16.1%}", file=shown)

    print(f"\n{'epoch':>8}{'digit loss':>13}{'pixel loss':>13}{'test accuracy':>16}", file=shown)
    # The plain copy, for the stock run's sake: DeepSpeed takes a forward without gradients for one
    # that a backward will follow, and so lets one second backward through: the first step would not
    # crash but get a wrong gradient.
    test(plain, 0)
    for epoch in range(1, epochs + 1):
        shuffled = others[torch.randperm(len(others))]
        for batch in shuffled.split(BATCH * ranks.RANKS)[:-1]:
            mine = batch[dist.get_rank() :: ranks.RANKS]
            step(engine, plain, images[mine], labels[mine], found)
        test(engine, epoch)
    found.finished = True


def one_rank(options: argparse.Namespace) -> int:
    shown, found = ranks.join(), Outcome()
    if options.side == "patched":
        import ds_patches

        for status in ds_patches.apply_all().values():
            print(f"   {status.name}: {status.state.value}; {status.reason}", file=shown)
        warnings = logging.StreamHandler(shown)
        warnings.setLevel(logging.WARNING)
        logging.getLogger("ds_patches").addHandler(warnings)
    try:
        train(options.epochs, options.seed, found, shown)
    except Exception as error:
        found.error = str(error).partition("\n")[0]
        logging.exception("training failed")
    Path(options.folder, f"{dist.get_rank()}.json").write_text(json.dumps(asdict(found)))
    dist.destroy_process_group()
    return 0


def run(side: str) -> Outcome | None:
    """What both ranks came to; None if one was lost."""
    with tempfile.TemporaryDirectory() as folder:
        own = ("--side", side, "--folder", folder)
        if ranks.start("examples.two_losses", *sys.argv[1:], *own):
            return None
        first, *others = (
            Outcome(**json.loads(f.read_text())) for f in sorted(Path(folder).iterdir())
        )
    for other in others:
        first.error = first.error or other.error
        first.differences += other.differences
        first.gathered = [*map(max, first.gathered, other.gathered)]
        first.finished &= other.finished
    return first


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.two_losses", description=__doc__)
    parser.add_argument("--epochs", type=int, default=12, help="epochs to train (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    parser.add_argument("--side", help=argparse.SUPPRESS)  # of a rank: stock or patched
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # where a rank leaves its outcome
    options = parser.parse_args()
    if options.side:
        return one_rank(options)
    print(f"{(__doc__ or '').partition(':')[0]}, on {ranks.RANKS} gloo ranks on CPU")
    print(f"  DeepSpeed {version('deepspeed')}, torch {version('torch')}")
    print("\nStock DeepSpeed", flush=True)
    stock = run("stock")
    print("\nPatched: import ds_patches; ds_patches.apply_all()", flush=True)
    patched = run("patched")
    if stock is None or patched is None:
        return 2
    print(f"\nSide by side\n{'':<34}{'stock':<40}patched")
    for label, before in stock.column().items():
        print(f"{label:<34}{before:<40}{patched.column()[label]}")
    faults = patched.faults()
    print("", *(f"FAILED, the patched run: {fault}" for fault in faults), sep="\n")
    if not faults:
        print("Use it: import ds_patches; ds_patches.apply_all() above deepspeed.initialize")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
