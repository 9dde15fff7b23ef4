"""Do no harm: real training scripts, each run by stock DeepSpeed, with every patch, and plainly.

The law, for every script and not only for those that a patch was written for: where stock is
right, patched is right; where stock fails loudly, patched works or fails loudly; where stock is
silently wrong, patched is right or says so. Nor does a patch hold more memory, or call more Python
in a step that it has no part in. :mod:`tests.scripts.law` is that, line by line.

A script says what is done in each step, or in each `micro` step, before ``trainer.step()``; or, as
a function of the trainer alone, all of a training, with a loop over ``trainer.steps()``:

    @script({1: RIGHT, 2: RIGHT, 3: raises("mat2 must be a matrix")}, model="Critic")
    def gradient_penalty(trainer: Any, step: int) -> None:
        \"\"\"The loss has the gradient by the inputs in it, as with WGAN-GP.\"\"\"
        ...
        trainer.backward(loss)

The trainer is an engine, or plain PyTorch that averages gradients over the ranks; what both can
do is in `tests/training`, as are models. The declaration says what stock comes to at each ZeRO
stage, which is tested too, and what :class:`~tests.training.options.Options` it is trained with. A
script must be good for being run twice on one trainer. Tests of a patch run it too.

Where patches call more Python than they may, ``costs={3: "why"}`` says so, by stage.

Two ranks run every script. Four ranks run them as two groups of two with data of their own, in
which the second of a group is not the second of the world. Stock has processes to which no patch
was ever applied (`worlds.py`).

`make test` runs few of each theme, `make test-all` all. `python -m tests.scripts.page` writes
docs/scripts.md of what they declare. A single one is run by
`pytest tests/scripts -k "gradient_penalty"`.
"""
