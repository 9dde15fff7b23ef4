"""Patches that have nothing to do: ``torchrun --nproc-per-node 2 -m benchmarks.at_rest``.

Ordinary steps of one engine: stock, patched, and stock again, which shows the noise. The model is
a Llama of transformers, built from a configuration, in bf16, with AdamW.
"""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import DTYPE, SEED, Row, compare, config, engine, options, start, tokens

OPTIONS = {
    "patches": ["all"],
    "stages": [1, 2, 3],
    "micro_steps": [1, 4],
    "widths": [1024, 2048],
    "tokens": [256, 4096],
    "layers": 12,
    "words": 8192,
    "warmup": 4,  # Python is slower for some steps after patches changed classes
    "steps": 4,
    "rounds": 21,
}


def llama(layers: int, width: int, words: int, device: torch.device) -> nn.Module:
    """`layers` blocks of `width`, heads of 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    made = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(made).to(device, DTYPE)
    return model


def one_step(engine: Any, micro_batches: list[Tensor]) -> None:
    for inputs in micro_batches:
        engine.backward(engine(input_ids=inputs, labels=inputs).loss)
        engine.step()


def main() -> None:
    of = options(__doc__, OPTIONS, widths=[64], tokens=[8], layers=2, steps=2, rounds=2)
    device = start(of)
    for width, stage, micro_steps in product(of.widths, of.stages, of.micro_steps):
        settings = config(1, micro_steps, stage=stage, reduce_bucket_size=4 * width**2)
        with engine(llama(of.layers, width, of.words, device), settings) as one:
            for count in of.tokens:
                step = partial(one_step, one, tokens(micro_steps, count, of.words, device))
                again = Row("stock again", step)
                rows = [Row("stock", step), Row("patched", step, of.patches), again]
                what = f"ZeRO {stage}, width {width}, {micro_steps} x {count} tokens"
                compare(what, rows, of, device)


if __name__ == "__main__":
    main()
