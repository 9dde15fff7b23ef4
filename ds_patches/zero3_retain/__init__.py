"""Several backwards over one ZeRO-3 forward; no parameter stays gathered in between.

Use
    Apply it. One forward may then have any number of backwards:

        out = engine(x)
        engine.backward(loss_one(out), retain_graph=True)
        engine.backward(loss_two(out))
        engine.step()

    From 0.18.3 on, ``engine.scale(loss).backward(...)`` and ``loss.backward(...)`` work too. The
    loss may be any tensor that the forward made. Gradients of gradients work as well
    (``create_graph=True``).

    A loss may have a part that is computed from the weights in a ``GatheredParameters``, as weight
    decay or orthogonality, with ``engine.backward`` in the block or after it. A forward within the
    block leaves gathered what the block has gathered.

    Recomputation works, too:

    - ``torch.utils.checkpoint`` on a frozen model with adapters. Stock to 0.19.2 raises `Recomputed
      values ... have different metadata`; later releases, if reentrant, keep all checkpointed parts
      gathered. With the patch one part is gathered at a time.
    - DeepSpeed's ``non_reentrant_checkpoint``, where stock raises in the first backward. Several
      backwards over it, and over DeepSpeed's ``checkpoint``, need ``activation_checkpointing``.

    The patch requires ``accumulation``, which adds up the gradients. At stages 1 and 2,
    ``accumulation`` alone is enough for several backwards.

Risks
    - **After the step.** Once ``engine.step()`` has updated the parameters, a backward over an
      earlier forward is refused, as in PyTorch.
    - **Memory of the graph.** Plain ``nn.Linear`` saves a view of its gathered weight for the
      backward, so a retained graph keeps that weight in memory. DeepSpeed replaces it by a Linear
      that does not: from 0.19.4 on always, before that for models built under
      ``deepspeed.zero.Init``, as by ``from_pretrained`` with a ZeRO-3 configuration.
    - **Loss scalers.** DeepSpeed up to 0.18.2 ignores ``retain_graph`` with a custom loss scaler.

Not covered
    A plain ``loss.backward()`` over a function of weights raises, as on stock. So does, from 0.18.0
    on, a backward over ``aux_loss`` alone of Mixtral and the MoE of Qwen2 and Qwen3: it is made of
    what lies inside modules that DeepSpeed gathers as a whole, and is no output of theirs. Set
    ``leaf_module: {"classes": []}`` in ``zero_optimization``, or add it to the other loss.

Cost
    Two backwards over one forward cost 1.42 times an ordinary step, because the second gathers the
    parameters again. Two forwards instead cost 1.66 times. Memory is that of an ordinary step and
    of the activations that a retained graph keeps. An ordinary step takes stock's
    time, and less if many modules hold no parameters (docs/benchmarks.md).

Why
    Stock ZeRO-3 gathers parameters only for the first backward over a forward. The second one
    fails; after a forward under ``torch.no_grad()`` it may be silently wrong instead. No release up
    to 0.19.8 has a fix.

    A function of weights keeps them in its graph, and after a ``GatheredParameters`` nothing of
    them is there. Stock raises, in all releases.

How
    Each backward gathers the parameters of a module when it reaches the module, and releases them
    after it. So nothing stays gathered between two backwards.

    ``checkpoint(use_reentrant=False)`` compares the shape of a recomputed frozen parameter in the
    end. So recomputed modules are released only when the backward reaches the next module.
    DeepSpeed's recomputation releases the module in whose backward it runs; that module is gathered
    again.

    Before a backward over a loss, nodes that have saved parameters of a ``GatheredParameters`` are
    told to gather them when they run.

Upstream
    Issues 7352 and 3539; pull requests 8045 and 8135 (open), which keep every gathered parameter
    until a backward that does not retain its graph. Pull requests 8148 (frozen parameters) and 8144
    (``modules_to_save``), in 0.19.3. Issue 4595 (open) is about ``non_reentrant_checkpoint``.
"""

from ds_patches.core import api

apply, unapply, is_applied = api.of(__name__)
