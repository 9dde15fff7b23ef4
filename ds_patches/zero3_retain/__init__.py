"""Several backwards over one ZeRO forward, with PyTorch's gradients and no parameter held.

What
    ``out = engine(x)``, then ``engine.backward(loss1, retain_graph=True)`` and
    ``engine.backward(loss2)``, any number of them, also as ``engine.scale(loss).backward(...)`` and
    plain ``loss.backward(retain_graph=True)`` where the release has those (0.18.3 and later).
    Gradients add up as in PyTorch; ``engine.zero_grad()`` between two backwards drops what came
    before it.

Why
    Stock ZeRO-3 gathers parameters for the first backward over a forward and for no other. The
    second fails with ``The size of tensor a (0) must match the size of tensor b (...)``; after a
    forward under ``torch.no_grad()`` it may run instead, and be wrong. Stock ZeRO-1/2 runs and
    silently keeps only the last loss's gradient (0.18.3 and later) or fails with a TypeError
    (0.17.6 to 0.18.2). No release up to 0.19.8 has a fix.

How
    Gather and release belong to the backward, not to the forward: each run of the autograd engine
    gathers what it passes and releases it behind itself. Nothing stays gathered between two
    backwards, so memory is an ordinary backward's; what a retained graph holds anyway are its
    activations. The price is time: a second backward gathers again (docs/benchmarks.md).

What to know
    - A forward can be gone over again until ``engine.step()`` has updated its parameters. After
      that, a second backward over it is refused, as PyTorch refuses it.
    - If a backward raises, every gradient reduced since the last step is dropped, with a warning:
      part of it may have been reduced already. The next forward starts clean; ``engine.step()``
      without a backward since is refused.
    - ``zero_grad()`` counts on the engine and on its ZeRO optimizer. PyTorch's own
      ``module.zero_grad()`` finds nothing to clear under ZeRO, patched or not.
    - Plain ``nn.Linear`` saves a view of its gathered weight for backward, so that a *retained*
      graph keeps the weight alive however soon it is released. From 0.19.4 DeepSpeed puts a Linear
      in its place that does not; before, it does so for models built under
      ``deepspeed.zero.Init`` (``from_pretrained`` with a ZeRO-3 config is).
    - Engines with a ZenFlow, SuperOffload or MiCS optimizer are left to stock, with a warning;
      engines under DeepCompile are left to stock.
    - A custom loss scaler drops ``retain_graph`` inside stock DeepSpeed up to 0.18.2.

Option
    ``lost_gradients`` (``DS_PATCHES_ZERO3_RETAIN_LOST_GRADIENTS``): what happens when a backward
    over *another* forward is about to overwrite a gradient of the same step, which stock does
    with ``gradient_accumulation_steps=1``. ``warn`` (default) keeps stock's numbers and says so
    once, ``accumulate`` adds, ``silent`` keeps stock's numbers.

Upstream
    issues 7352 and 3539, pull requests 8045 and 8135 (open). Those keep every gathered parameter
    until a backward that does not retain its graph.

Remove it when
    your release gathers per backward and adds the gradients of several backwards over one forward.
"""
