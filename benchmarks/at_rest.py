"""Patches that have nothing to do: ``torchrun --nproc-per-node 2 -m benchmarks.at_rest``.

Ordinary steps of one engine: stock, patched, and stock again, which shows the noise. The model is
a Llama of transformers, built from a configuration, in bf16, with AdamW. It trains whole, with
activation checkpointing, or by LoRA alone. With ``--patches zero3_gather_once --stages 3`` the
patched row gathers parameters once a step.
"""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import DTYPE, SEED, Row, compare, config, engine, options, start, tokens

OPTIONS = {
    "patches": ["all"],
    "models": ["whole"],  # or checkpointing, lora
    "stages": [1, 2, 3],
    "micro_steps": [1, 4],
    "thresholds": [0],  # of elements, below which ZeRO 3 keeps a parameter gathered
    "live": 10**9,  # elements that ZeRO 3 may have gathered
    "widths": [1024, 2048],
    "tokens": ["256", "4096"],  # or "4x1024", four sequences of a rank
    "layers": 12,
    "words": 8192,
    "warmup": 4,  # Python is slower for some steps after patches changed classes
    "steps": 4,
    "rounds": 21,
}
_RANK_OF_LORA = 8


def llama(kind: str, layers: int, width: int, words: int, device: torch.device) -> nn.Module:
    """Build `layers` blocks of `width`, heads of 64, which train as `kind` says."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    sizes = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(sizes).to(device, DTYPE)
    if kind == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=_RANK_OF_LORA)).bfloat16()
    return model  # type: ignore[no-any-return]


def one_step(engine: Any, micro_batches: list[Tensor]) -> None:
    for inputs in micro_batches:
        engine.backward(engine(input_ids=inputs, labels=inputs).loss)
        engine.step()


def main() -> None:
    of = options(__doc__, OPTIONS, widths=[64], tokens=["8"], layers=2, steps=2, rounds=2)
    device = start(of)
    rows = of.models, of.widths, of.stages, of.thresholds, of.micro_steps
    for kind, width, stage, threshold, micro_steps in product(*rows):
        zero = {
            "stage": stage,
            "stage3_param_persistence_threshold": threshold,
            "stage3_max_live_parameters": of.live,
            "reduce_bucket_size": 4 * width**2,
        }
        model = llama(kind, of.layers, width, of.words, device)
        with engine(model, config(1, micro_steps, **zero)) as trained:
            for shape in of.tokens:
                *sequences, length = map(int, shape.split("x"))
                count = sequences[0] if sequences else 1
                joined = tokens(micro_steps, count * length, of.words, device)
                step = partial(one_step, trained, [batch.view(count, length) for batch in joined])
                again = Row("stock again", step)
                turns = [Row("stock", step), Row("patched", step, of.patches), again]
                what = f"ZeRO {stage}, {kind}, width {width}, {micro_steps} x {shape} tokens"
                compare(f"{what}, persistent below {threshold}", turns, of, device)


if __name__ == "__main__":
    main()
