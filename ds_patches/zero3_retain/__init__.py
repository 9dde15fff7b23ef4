"""Several backwards over one ZeRO-3 forward, with no parameter held in between.

What
    ``out = engine(x)``, then ``engine.backward(loss1, retain_graph=True)`` and
    ``engine.backward(loss2)``, any number of them, also as ``engine.scale(loss).backward(...)`` and
    plain ``loss.backward(retain_graph=True)`` where the release has those (0.18.3 and later), of
    any tensor that the forward made; and gradients of gradients, ``create_graph=True``.

Why
    Stock ZeRO-3 gathers parameters for the first backward over a forward and for no other. The
    second fails with ``The size of tensor a (0) must match the size of tensor b (...)``; after a
    forward under ``torch.no_grad()`` it may run instead, and be wrong. No release up to 0.19.8 has
    a fix.

How
    Gather and release belong to the backward, not to the forward: each run of the autograd engine
    gathers what it passes and releases it behind itself. Nothing stays gathered between two
    backwards, so memory is an ordinary backward's; what a retained graph holds anyway are its
    activations. The price is time: a second backward gathers again (docs/benchmarks.md).

    It requires ``accumulation``, by which the gradients of all backwards add up; at stages 1 and 2
    that is all there is to it.

What to know
    - A forward has backwards until ``engine.step()`` has updated its parameters. After that one
      over it is refused, the first one too, as PyTorch refuses it.
    - Plain ``nn.Linear`` saves a view of its gathered weight for backward, so that a *retained*
      graph keeps the weight alive however soon it is released. From 0.19.4 DeepSpeed puts a Linear
      in its place that does not; before, it does so for models built under
      ``deepspeed.zero.Init`` (``from_pretrained`` with a ZeRO-3 config is).
    - A custom loss scaler drops ``retain_graph`` inside stock DeepSpeed up to 0.18.2.

Upstream
    issues 7352 and 3539, pull requests 8045 and 8135 (open). Those keep every gathered parameter
    until a backward that does not retain its graph.

Remove it when
    your release gathers per backward.
"""
