"""Several backwards over one ZeRO-3 forward; no parameter stays gathered in between.

Use
    Apply it. One forward may then have any number of backwards:

        out = engine(x)
        engine.backward(loss_one(out), retain_graph=True)
        engine.backward(loss_two(out))
        engine.step()

    From 0.18.3 on, ``engine.scale(loss).backward(...)`` and ``loss.backward(...)`` work too.
    ``engine.backward`` takes any tensor that the forward made. Gradients of gradients work as well
    (``create_graph=True``).

    A part of the loss may be computed from the weights in a ``GatheredParameters``, such as weight
    decay. Call ``engine.backward`` in that block or after it. A forward within the block does not
    release what the block has gathered.

    Recomputation works, too:

    - ``torch.utils.checkpoint`` on a frozen model with adapters. Up to 0.19.2 stock raises
      `Recomputed values ... have different metadata`; later, with ``use_reentrant=True``, it keeps
      all checkpointed parts gathered. With the patch one part is gathered at a time.
    - DeepSpeed's ``non_reentrant_checkpoint``, where stock raises in the first backward. Several
      backwards over it, and over DeepSpeed's ``checkpoint``, need ``activation_checkpointing``.

    The patch requires ``accumulation``, which adds up the gradients. At stages 1 and 2,
    ``accumulation`` alone is enough for several backwards.

Risks
    - **After the step.** Once ``engine.step()`` has updated the parameters, a backward over an
      earlier forward is refused, as in PyTorch.
    - **Memory of the graph.** Plain ``nn.Linear`` saves a view of its gathered weight for the
      backward, so a retained graph keeps that weight in memory. DeepSpeed replaces it by a Linear
      that does not: from 0.19.4 on always, before that only in models built under
      ``deepspeed.zero.Init``, as ``from_pretrained`` does with a ZeRO-3 configuration.
    - **Loss scalers.** DeepSpeed up to 0.18.2 ignores ``retain_graph`` with a custom loss scaler.

Not covered
    A plain ``loss.backward()`` over a function of weights raises, as on stock.

    From 0.18.0 on a backward over the ``aux_loss`` of Mixtral and of the MoE of Qwen2 and Qwen3
    raises, as on stock, if it is the whole loss: DeepSpeed gathers their MoE blocks as a whole, and
    ``aux_loss`` comes from inside them. Add it to the other loss, or set
    ``leaf_module: {"classes": []}`` in ``zero_optimization``.

Cost
    Two backwards over one forward cost 1.42 times an ordinary step, because the second gathers the
    parameters again. Two forwards instead cost 1.66 times. Memory is that of an ordinary step, and
    the activations that a retained graph keeps. An ordinary step takes stock's time, or less if
    many modules hold no parameters (docs/benchmarks.md).

Why
    Stock ZeRO-3 gathers parameters only for the first backward over a forward. The second one
    fails; after a forward under ``torch.no_grad()`` it may be silently wrong instead. No release up
    to 0.19.8 has a fix.

    The graph of a function of weights refers to the weights, which are empty once the
    ``GatheredParameters`` ends. Stock raises, in all releases.

How
    Each backward gathers the parameters of a module when it reaches the module, and releases them
    after it. So nothing stays gathered between two backwards.

    ``checkpoint(use_reentrant=False)`` compares the shapes of recomputed frozen parameters last. So
    a recomputed module is released only when the backward reaches the next module. DeepSpeed's own
    recomputation releases the module in whose backward it runs; the patch gathers it again.

    Nodes of the loss's graph that have saved parameters of a ``GatheredParameters`` gather them
    when they run in a backward.

Upstream
    Issues 7352 and 3539; pull requests 8045 and 8135 (open), which keep every gathered parameter
    until a backward that does not retain its graph. Pull requests 8148 (frozen parameters) and 8144
    (``modules_to_save``), in 0.19.3. Issue 4595 (open) is about ``non_reentrant_checkpoint``.
"""

from ds_patches.core import api

apply, unapply, is_applied = api.of(__name__)
