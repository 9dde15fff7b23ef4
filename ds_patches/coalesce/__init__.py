"""N backwards, one gradient reduction.

What
    ``with engine.coalesce_grad_reduction():`` around any number of forwards and backwards, then
    ``engine.step()``. Inside, gradients add up on the parameters; when the block ends, they are
    reduced once, and added to what the step has reduced before. ZeRO 1, 2 and 3, on every release.

        with engine.coalesce_grad_reduction():
            for chunk in chunks:
                engine.backward(loss_of(engine(chunk)))
        engine.step()

    ``with engine.no_sync():`` at stages 2 and 3, as DistributedDataParallel has it. And a backward
    with others inside it, as of a cached loss: it ends with one reduction, without a block.

    GradCache and Accelerate: docs/coalesce-in-practice.md.

Why
    DeepSpeed has the method from 0.19.1 on; without it N backwards per step are N reductions. The
    method of 0.19.1 to 0.19.8 reduces what is there when something inside raises, so that half a
    window becomes a step; if one rank alone raised, the others wait for it until a timeout. And
    ``no_sync()`` is an AssertionError at stages 2 and 3, which is how ``accelerator.accumulate()``
    ends on many pairs of releases.

How
    - The name is added where it is missing, and replaced where it is not.
    - ZeRO-1/2 flush by reduce-scatter, half an all-reduce's bytes, where that is known to be right:
      not with an offloaded optimizer, experts, sequence parallelism, ``torch.autocast``, Muon, or
      ``reduce_scatter`` off. There, and at stage 3, DeepSpeed's own reducer does it. The number of
      collectives does not depend on N.
    - Ranks meet before they reduce. If one raised, the others raise ``OtherRankFailed``, with its
      number and its error.
    - Parameters without a gradient count as zeros, also where only some ranks have one.
    - It requires ``accumulation``, which knows what a backward is, and adds. Where no gradient
      waits, nothing of ours is in the way of one.

Arguments
    - ``gather_once=True``, stage 3: all parameters are gathered when the block opens, and the
      module hooks that gather and release are taken away until it ends, so that forwards and
      backwards run as a plain module's. The price is a whole copy of the parameters, in their own
      precision, on every rank. Not with ZeRO++ secondary partitions, nor parameters on NVMe.

If something raises
    The block's gradients are dropped, nothing is reduced, flags and hooks are as they were before,
    and the exception goes on. So may training: the next block is as if this one had not been. Let
    the exception leave the block: a backward that raised spoils its block even if that is caught
    inside, and the block ends in a RuntimeError; ``accumulation`` drops all of its step. At stage 3
    a rank that raises alone in the middle leaves the others in their next gather, until the process
    group's timeout; with ``gather_once=True`` they gather nothing, and are told at the end.

no_sync()
    - Gradients stay on their parameters inside, and until a backward outside, at the gradient
      accumulation boundary, has ended: that reduces the sum, all of it in one pass.
    - Its price is memory: whole gradients, in the precision of the parameters, on every rank until
      then, and no overlap with that backward. Its ranks do not meet: each step needs one reduction
      on every rank, and at stage 3 as many backwards.
    - After an exception of other code gradients stay, as in DistributedDataParallel;
      ``engine.zero_grad()`` drops them. ``engine.step()`` inside counts a micro step, as Accelerate
      up to 1.7 has it, and is an AssertionError at the boundary; outside, before what waits is
      reduced, a RuntimeError.
    - A loss is divided by gradient_accumulation_steps there too, as Accelerate expects; up to
      0.18.2 stock leaves that out.
    - Stage 1, and engines that cannot have a block, keep stock's.

What to know
    - ``engine.step()`` inside, a block inside a block of the same engine, and blocks and
      ``no_sync()`` inside each other are AssertionErrors, as with DeepSpeed's own.
    - NotImplementedError: ZeRO stage 0, BF16_Optimizer and FP16 wrappers, pipelines, ZenFlow,
      SuperOffload, MiCS, DeepCompile, an optimizer on NVMe, AutoEP folding. AssertionError:
      ``managed_gradient_accumulation=False``.
    - With gradient_accumulation_steps above 1, a block is a micro step: its losses are divided, and
      ``engine.step()`` after it counts. The boundary that was set last inside holds after it.
    - Inside, gradients are this rank's own: ``safe_get_full_grad`` gives them as they are, not
      reduced, and so does DeepSpeed's own method. After the block it gives the average.
    - Gradients add up in the precision of the parameters, as on any PyTorch parameter. At stage 1
      with an offloaded optimizer, a low precision model and fp32 sums, they do in fp32.

Options
    - ``implementation`` (``DS_PATCHES_COALESCE_IMPLEMENTATION``): ``ours`` (default); ``native``
      leaves DeepSpeed's own method, 0.19.1 and later. ``DS_PATCHES_COALESCE=native`` is short for
      ``DS_PATCHES_COALESCE=1`` and that.
    - ``flush`` (``DS_PATCHES_COALESCE_FLUSH``): ``reduce_scatter`` (default), ``upstream``.
    - ``handshake`` (``DS_PATCHES_COALESCE_HANDSHAKE``): where ranks meet. ``on`` (default): ranks
      of one host, which ``LOCAL_WORLD_SIZE`` equal to ``WORLD_SIZE`` says, in a small file in
      memory, ``/dev/shm``; others in the process group's store. ``store``: always there. ``off``:
      nowhere; then one that raises alone hangs all, and where DeepSpeed's own reducer flushes,
      ranks must be alike in which parameters have gradients.
    - ``no_sync`` (``DS_PATCHES_COALESCE_NO_SYNC``): ``on`` (default), ``off`` leaves DeepSpeed's.

Upstream
    pull request 7992 (the method, 0.19.1).

Remove it when
    every release you use has the method, and its exit reduces nothing after an exception.
"""
