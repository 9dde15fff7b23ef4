"""Several backwards over one ZeRO-3 forward: ``torchrun --nproc-per-node 2 -m benchmarks.retain``.

One forward and two losses, whose gradients add up, against an ordinary step and against the way
around, a forward for each loss; stock raises at the second backward. Where every parameter is
persistent stock can do it: what a second backward costs that gathers nothing. The model is
16 x (Linear(4096, bias=False) + ReLU) in bf16, with AdamW.
"""

from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.harness import Row, batches, compare, config, engine, mlp, options, start

OPTIONS = {"layers": 16, "width": 4096, "batch": 512, "warmup": 5, "steps": 20, "rounds": 10}


def one_forward(engine: Any, inputs: Tensor, targets: list[Tensor]) -> None:
    """A backward for each target."""
    outputs = engine(inputs)
    for target in targets:
        engine.backward((outputs * target).mean(), retain_graph=target is not targets[-1])
    engine.step()


def a_forward_each(engine: Any, inputs: Tensor, targets: list[Tensor]) -> None:
    for target in targets:
        engine.backward((engine(inputs) * target).mean())
    engine.step()


def main() -> None:
    of = options(__doc__, OPTIONS, layers=2, width=64, batch=8, warmup=2, steps=2, rounds=2)
    device, layer = start(of), of.width**2
    inputs, *both = batches(3, of.batch, of.width, device)
    for persistent in (False, True):
        settings = config(
            of.batch,
            stage=3,
            reduce_bucket_size=layer,
            sub_group_size=10**9,
            stage3_prefetch_bucket_size=layer,
            stage3_param_persistence_threshold=layer if persistent else 0,
            stage3_max_live_parameters=10**9,
            stage3_max_reuse_distance=10**9,
        )
        with engine(mlp(of.layers, of.width, device), settings) as trained:
            ordinary = partial(one_forward, trained, inputs, both[:1])
            two_losses = partial(one_forward, trained, inputs, both)
            rows = [Row("stock, one loss", ordinary)]
            if persistent:
                rows += [Row("stock, two losses", two_losses)]
            else:
                rows += [
                    Row("patched, one loss", ordinary, ["zero3_retain"]),
                    Row("patched, two losses", two_losses, ["zero3_retain"]),
                    Row("stock, two forwards", partial(a_forward_each, trained, inputs, both)),
                ]
            compare("all persistent" if persistent else "ZeRO 3", rows, of, device)


if __name__ == "__main__":
    main()
