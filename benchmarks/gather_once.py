"""ZeRO 3 gathered once a step: ``torchrun --nproc-per-node 2 -m benchmarks.gather_once``.

Ordinary ZeRO-3 steps of one engine: stock, with zero3_gather_once, and stock again, which shows the
noise. The model is a Llama of transformers, built from a configuration, in bf16, with AdamW. It
trains whole, with activation checkpointing, or by LoRA alone.
"""

from functools import partial
from itertools import product
from typing import Any

from torch import nn

from benchmarks.at_rest import llama, one_step
from benchmarks.harness import Row, compare, config, engine, options, start, tokens

OPTIONS = {
    "models": ["whole", "checkpointing", "lora"],
    "micro_steps": [1, 4],
    "thresholds": [0, 10**5],
    "shapes": ["1x512", "4x1024"],
    "live": 10**9,
    "layers": 12,
    "width": 1024,
    "words": 8192,
    "warmup": 2,  # the first forward after applying is gathered by stock
    "steps": 2,
    "rounds": 9,
}
_RANK_OF_LORA = 8


def of_kind(kind: str, model: nn.Module) -> nn.Module:
    """The model, which trains as its kind says."""
    if kind == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        made: Any = get_peft_model(model, LoraConfig(r=_RANK_OF_LORA))  # type: ignore[arg-type]
        return made.bfloat16()  # type: ignore[no-any-return]
    return model


def main() -> None:
    small = {"layers": 2, "width": 64, "models": ["whole", "checkpointing"], "thresholds": [0]}
    of = options(__doc__, OPTIONS, **small, shapes=["2x8"], steps=1, rounds=2)
    device = start(of)
    for kind, threshold, micro_steps in product(of.models, of.thresholds, of.micro_steps):
        zero = {
            "stage": 3,
            "stage3_param_persistence_threshold": threshold,
            "stage3_max_live_parameters": of.live,
            "reduce_bucket_size": 4 * of.width**2,
        }
        model = of_kind(kind, llama(of.layers, of.width, of.words, device))
        with engine(model, config(1, micro_steps, **zero)) as one:
            for shape in of.shapes:
                sequences, length = map(int, shape.split("x"))
                joined = tokens(micro_steps, sequences * length, of.words, device)
                batches = [batch.view(sequences, length) for batch in joined]
                step = partial(one_step, one, batches)
                rows = [
                    Row("stock", step),
                    Row("gathered once", step, ["zero3_gather_once"]),
                    Row("stock again", step),
                ]
                what = f"{kind}, persistent below {threshold}, {micro_steps} x {shape} tokens"
                compare(what, rows, of, device)


if __name__ == "__main__":
    main()
