"""N backwards, one gradient reduction.

What
    ``with engine.coalesce_grad_reduction():`` around any number of forwards and backwards, then
    ``engine.step()``. One block is one optimizer step. Inside, gradients add up on the parameters;
    when the block ends, they are reduced once. ZeRO 1, 2 and 3, on every release.

        with engine.coalesce_grad_reduction():
            for chunk in chunks:
                engine.backward(loss_of(engine(chunk)))
        engine.step()

Why
    DeepSpeed has the method from 0.19.1 on. Without it, N backwards per step are N reductions, or
    gradients are lost in silence: 0.18.3 and later keep the last backward only at stages 1 and 2,
    and no release adds backwards up with an offloaded optimizer there. The method of 0.19.1 to
    0.19.8 reduces what is there when something inside raises, so that half a window becomes a
    step; if one rank alone raised, the others wait for it until a timeout.

How
    - The name is added where it is missing, and replaced where it is not
      (``implementation=native`` leaves DeepSpeed's own).
    - ZeRO-1/2 flush by reduce-scatter, half an all-reduce's bytes, where that is known to be
      right; elsewhere, and at stage 3, by DeepSpeed's own reducer. The number of collectives does
      not depend on N.
    - Ranks meet in the process group's store before they reduce. If one raised, the others raise
      ``OtherRankFailed``, with its number and its error.
    - Parameters without a gradient count as zeros, also where only some ranks have one. Stock's
      stage 3, and its offloaded optimizers, step again with the gradient of an older step.

Arguments, beyond DeepSpeed's own
    num_backwards
        How many backwards the block has. One more is a RuntimeError; fewer are fine.
    gather_once
        Stage 3: what was gathered stays so until the block ends. A block then gathers each
        parameter once, not twice per backward, and holds a whole copy of the parameters, in their
        own precision, on every rank.

If something raises
    The block's gradients are dropped, nothing is reduced, flags and hooks are as they were before,
    and the exception goes on. So may training: the next block is as if this one had not been. A
    backward that raises spoils its block even if the exception is caught inside: the block then
    ends in a RuntimeError.

Outside blocks
    ``no_sync=on``
        ``engine.no_sync()`` works at stages 2 and 3, and is DistributedDataParallel's at 1, 2 and
        3: gradients stay on their parameters, and the next backward outside, at the boundary,
        reduces the sum. Micro steps before the gradient accumulation boundary reduce nothing
        either, so a step costs one reduction. This is what Accelerate's ``accumulate()`` needs.
        What one step reduces twice adds up; ``engine.zero_grad()`` drops it.
    ``micro_steps``
        0.17.6 to 0.18.2: ZeRO-2 keeps the last micro step only, and a second backward at the
        boundary is a TypeError. Here they add up.
    ``lost_gradients``
        Several backwards before one step, each taken for its last, lose all but the last one's
        gradients (see Why). ``warn`` says so, once per engine; ``accumulate`` adds them.

What to know
    - ``engine.step()`` inside, a block inside a block of the same engine, and blocks and
      ``no_sync()`` inside each other are AssertionErrors, as with DeepSpeed's own.
    - NotImplementedError: ZeRO stage 0, BF16_Optimizer and FP16 wrappers, pipelines, ZenFlow,
      SuperOffload, MiCS, DeepCompile, an optimizer on NVMe, AutoEP folding; ``gather_once`` below
      stage 3 and with ZeRO++ secondary partitions. AssertionError:
      ``managed_gradient_accumulation=False``.
    - What was reduced earlier in the same step is replaced, with a warning.
    - Gradients add up in the precision of the parameters, as on any PyTorch parameter; at stage 1
      with an offloaded optimizer and fp32 accumulation, in fp32.
    - At stage 3 every forward and backward gathers, and a gather needs all ranks. A rank that
      raises alone in the middle of a block leaves the others in their next gather, until the
      process group's timeout: the store cannot call them back from there.
    - ``set_gradient_accumulation_boundary()`` may be called inside; what it was set to last holds
      after the block.

What to know of no_sync=on
    - A loss is divided by gradient_accumulation_steps in ``no_sync()`` too, as Accelerate expects;
      up to 0.18.2 stock leaves that out there.
    - The reduction follows the last backward, it does not overlap with it, and whole gradients stay
      on every rank until then, in the precision of the parameters: at stages 2 and 3 more memory
      than stock's micro steps take.
    - Parameters without a gradient take part with zeros. Ranks may have unlike numbers of backwards
      at stages 1 and 2, but each step needs one reduction on every rank; there is no handshake.
    - After an exception gradients stay, as in DistributedDataParallel: ``engine.zero_grad()`` drops
      them, else they are in the next step. A backward that raised says so.
    - ``engine.step()`` in ``no_sync()`` counts a micro step, as Accelerate up to 1.3 has it; at the
      boundary it is an AssertionError. Outside, before what was gathered is reduced, it is a
      RuntimeError.
    - Engines that cannot have a block are left to stock, with a warning.

Options
    ``implementation`` (``DS_PATCHES_COALESCE_IMPLEMENTATION``): ``ours`` (default), ``native``.
    ``flush`` (``DS_PATCHES_COALESCE_FLUSH``): ``reduce_scatter`` (default), ``upstream``.
    ``no_sync`` (``DS_PATCHES_COALESCE_NO_SYNC``): ``off`` (default), ``on``.
    ``micro_steps`` (``DS_PATCHES_COALESCE_MICRO_STEPS``): ``added`` (default), ``upstream``.
    ``lost_gradients`` (``DS_PATCHES_COALESCE_LOST_GRADIENTS``): ``warn`` (default),
    ``accumulate``, ``silent``.
    ``handshake`` (``DS_PATCHES_COALESCE_HANDSHAKE``): ``on`` (default), ``off``, which saves a few
    round trips to the store per block.

Upstream
    pull requests 7992 (the method, 0.19.1), 7981 (offload, 0.19.0), 7665 (``loss.backward()``,
    0.18.3).

Remove it when
    every release you use has the method, and its exit reduces nothing after an exception.
"""
