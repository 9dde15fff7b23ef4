"""Several backwards over one ZeRO-3 forward, with no parameter held in between.

Use
    Apply it. One forward may then have any number of backwards:

        out = engine(x)
        engine.backward(loss_one(out), retain_graph=True)
        engine.backward(loss_two(out))
        engine.step()

    ``engine.scale(loss).backward(...)`` and ``loss.backward(...)`` work too, in releases that have
    them (0.18.3 and later). The loss may be any tensor that the forward made. Gradients of
    gradients work as well (``create_graph=True``).

    A frozen model with adapters may be recomputed, by ``checkpoint`` of both kinds: without
    `Recomputed values ... have different metadata` (stock to 0.19.2), and with one checkpointed
    part gathered at a time (stock from 0.19.3 on: all of them, if reentrant). So may any model, by
    ``non_reentrant_checkpoint`` of DeepSpeed (stock: an error in the first backward); several
    backwards over that, and over DeepSpeed's ``checkpoint``, need ``activation_checkpointing``.

    At stages 1 and 2, ``accumulation`` is all that several backwards need. This patch requires it:
    it adds up the gradients.

Risks
    - **After the step.** A forward has backwards until ``engine.step()`` has updated its
      parameters. A later one over that forward is refused, as PyTorch refuses it, even if it is the
      first.
    - **Memory of the graph.** Plain ``nn.Linear`` saves a view of its gathered weight for the
      backward, so a retained graph keeps that weight in memory. DeepSpeed puts a Linear in its
      place that does not: from 0.19.4 on always, before that for models built under
      ``deepspeed.zero.Init``, as ``from_pretrained`` does with a ZeRO-3 configuration.
    - **Loss scalers.** DeepSpeed up to 0.18.2 drops ``retain_graph`` if it has a custom loss
      scaler.

Cost
    A second backward gathers the parameters again: a step with two backwards takes 1.45 times an
    ordinary one. Two forwards instead take 1.96. Memory is an ordinary step's, besides the
    activations that any retained graph keeps. An ordinary step takes 0.90 to 0.95 of stock's time
    (docs/benchmarks-zero3-retain.md).

Why
    Stock ZeRO-3 gathers parameters for the first backward over a forward and for no other. The
    second one fails. After a forward under ``torch.no_grad()`` it may run instead, and be wrong. No
    release up to 0.19.8 has a fix.

How
    Each run of the autograd engine gathers the parameters that it comes to, and releases them
    behind itself. So gathering belongs to the backward, no longer to the forward, and nothing stays
    gathered between two backwards.

    ``checkpoint(use_reentrant=False)`` keeps of a recomputed frozen parameter no copy, but the
    parameter, and compares its shape in the end. So what was recomputed is released when the
    backward comes to the next module. Reentrant recomputation has a backward of its own.
    Recomputation that goes on to its end, as DeepSpeed's does, releases the module in whose
    backward it runs; that module is gathered again.

Upstream
    Pull request 8148 (0.19.3) is upstream's for frozen parameters, 8144 for ``modules_to_save``.
    Issues 7352 and 3539; pull requests 8045 and 8135 (open). Those keep every gathered parameter
    until a backward that does not retain its graph. Issue 4595 (open) is about DeepSpeed's
    ``non_reentrant_checkpoint``.
"""

from ds_patches.core import handles

apply, unapply, is_applied = handles.of(__name__)
