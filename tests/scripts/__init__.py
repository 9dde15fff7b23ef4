"""Do no harm: real training scripts, each run by stock DeepSpeed, with every patch, and plainly.

Where stock is right, patched is right; where stock fails loudly, patched works or fails loudly;
where stock is silently wrong, patched is right or says so: :mod:`tests.scripts.law`, line by line.

A script says what is done in each step, or in each `micro` step, before ``trainer.step()``; or, as
a function of the trainer alone, all of a training, with a loop over ``trainer.steps()``:

    @script({1: RIGHT, 2: RIGHT, 3: raises("mat2 must be a matrix")}, model="Critic")
    def gradient_penalty(trainer: Any, step: int) -> None:
        \"\"\"The loss has the gradient by the inputs in it, as with WGAN-GP.\"\"\"
        ...
        trainer.backward(loss)

The trainer is an engine, or plain PyTorch that averages gradients over the ranks; what both can
do is in `tests/harness`, as are models. The declaration says what stock comes to at each ZeRO
stage, which is tested too, and what :class:`~tests.harness.options.Options` it is trained with. A
script must be good for being run twice on one trainer. Tests of a patch run it too.

Two ranks run every script, and four as two groups of two. Stock has processes to which no patch
was ever applied (`worlds.py`). `python -m tests.scripts.page` writes docs/scripts.md of them.
`pytest tests/scripts -k "gradient_penalty"` runs one.
"""
