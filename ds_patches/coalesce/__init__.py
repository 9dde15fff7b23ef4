"""N backwards, one gradient reduction.

What
    ``with engine.coalesce_grad_reduction():`` around any number of forwards and backwards, then
    ``engine.step()``. One block is one optimizer step: inside, gradients add up on the parameters;
    when it ends, they are reduced once. ZeRO 1, 2 and 3, on every release.

        with engine.coalesce_grad_reduction():
            for chunk in chunks:
                engine.backward(loss_of(engine(chunk)))
        engine.step()

    GradCache and Accelerate: docs/coalesce-in-practice.md.

Why
    DeepSpeed has the method from 0.19.1 on. Without it, N backwards per step are N reductions, or
    gradients are lost in silence: 0.18.3 and later keep the last backward only at stages 1 and 2,
    and with an offloaded optimizer every release loses some there (0.19.8: of an fp32 model). The
    method of 0.19.1 to 0.19.8 reduces what is there when something inside raises, so that half a
    window becomes a step; if one rank alone raised, the others wait for it until a timeout.

How
    - The name is added where it is missing, and replaced where it is not.
    - ZeRO-1/2 flush by reduce-scatter, half an all-reduce's bytes, where that is known to be right:
      not with an offloaded optimizer, experts, sequence parallelism, ``torch.autocast``, Muon, or
      ``reduce_scatter`` off. There, and at stage 3, DeepSpeed's own reducer does it. The number of
      collectives does not depend on N.
    - Ranks meet before they reduce. If one raised, the others raise ``OtherRankFailed``, with its
      number and its error.
    - Parameters without a gradient count as zeros, also where only some ranks have one. Stock's
      stage 3, and its offloaded optimizers, step again with the gradient of an older step.

Arguments
    - ``num_backwards=N`` announces the last backward of the block. So does
      ``engine.set_gradient_accumulation_boundary(False)`` and, later in the block, ``True``. Where
      the reduce-scatter applies, buckets are then reduced while that backward runs. Fewer backwards
      are fine, one more is a RuntimeError; that of a plain ``loss.backward()`` again over one
      forward is noticed only when its first gradient arrives. If only some ranks announce, nothing
      is sent before the end. It pays where communication is slow against compute, and costs some
      time of the host: small steps, bound by the host, are as fast or faster without.
    - ``gather_once=True``, stage 3: all parameters are gathered when the block opens, and the
      module hooks that gather and release are taken away until it ends, so that forwards and
      backwards run as a plain module's. The price is a whole copy of the parameters, in their own
      precision, on every rank. Not with ZeRO++ secondary partitions, nor parameters on NVMe.

If something raises
    The block's gradients are dropped, nothing is reduced, flags and hooks are as they were before,
    and the exception goes on. So may training: the next block is as if this one had not been. Let
    the exception leave the block: a backward that raised spoils its block even if that is caught
    inside, and the block ends in a RuntimeError. At stage 3 a rank that raises alone in the middle
    leaves the others in their next gather, until the process group's timeout; with
    ``gather_once=True`` they gather nothing, and are told at the end.

Outside blocks
    - ``no_sync=on``: ``engine.no_sync()`` works at stages 2 and 3, and is
      DistributedDataParallel's at 1, 2 and 3: gradients stay on their parameters, and the next
      backward outside, at the boundary, reduces the sum. Micro steps before the gradient
      accumulation boundary reduce nothing either, so a step costs one reduction. What one step
      reduces twice adds up; ``engine.zero_grad()`` drops it.
    - Its price is memory: whole gradients, in the precision of the parameters, on every rank until
      the last backward, and no overlap with that. Its ranks do not meet: each step needs one
      reduction on every rank, and at stage 3 as many backwards.
    - After an exception gradients stay, as in DistributedDataParallel; ``engine.zero_grad()`` drops
      them. ``engine.step()`` inside counts a micro step, as Accelerate up to 1.7 has it, and is an
      AssertionError at the boundary; outside, before what waits is reduced, a RuntimeError.
    - A loss is divided by gradient_accumulation_steps in ``no_sync()`` too, as Accelerate expects;
      up to 0.18.2 stock leaves that out there. Engines that cannot have a block stay stock's, with
      a warning.
    - ``micro_steps``: 0.17.6 to 0.18.2 keep ZeRO-2's last micro step only, and a second backward at
      the boundary is a TypeError. Here they add up.
    - ``lost_gradients``: several backwards before one step, each taken for its last, lose gradients
      (see Why). ``warn`` says so, once per engine; ``accumulate`` adds them.

What to know
    - ``engine.step()`` inside, a block inside a block of the same engine, and blocks and
      ``no_sync()`` inside each other are AssertionErrors, as with DeepSpeed's own.
    - NotImplementedError: ZeRO stage 0, BF16_Optimizer and FP16 wrappers, pipelines, ZenFlow,
      SuperOffload, MiCS, DeepCompile, an optimizer on NVMe, AutoEP folding. AssertionError:
      ``managed_gradient_accumulation=False``.
    - What was reduced earlier in the same step is replaced, with a warning. The boundary that was
      set last inside a block holds after it.
    - Gradients add up in the precision of the parameters, as on any PyTorch parameter. At stage 1
      with an offloaded optimizer, a low precision model and fp32 sums, they do in fp32. Stock up to
      0.19.7 steps there with sums that were never reduced; blocks, and ``no_sync=on`` with micro
      steps, are right.

Options
    - ``implementation`` (``DS_PATCHES_COALESCE_IMPLEMENTATION``): ``ours`` (default); ``native``
      leaves DeepSpeed's own method, 0.19.1 and later. ``DS_PATCHES_COALESCE=native`` is short for
      ``DS_PATCHES_COALESCE=1`` and that.
    - ``flush`` (``DS_PATCHES_COALESCE_FLUSH``): ``reduce_scatter`` (default), ``upstream``.
    - ``handshake`` (``DS_PATCHES_COALESCE_HANDSHAKE``): where ranks meet. ``on`` (default): ranks
      of one host, which ``LOCAL_WORLD_SIZE`` equal to ``WORLD_SIZE`` says, in a small file in
      memory, ``/dev/shm``; others in the process group's store. ``store``: always there. ``off``:
      nowhere; then one that raises alone hangs all, and ranks must be alike in what they announce
      and, where DeepSpeed's own reducer flushes, in which parameters have gradients.
    - ``no_sync`` (``DS_PATCHES_COALESCE_NO_SYNC``): ``off`` (default), ``on``.
    - ``micro_steps`` (``DS_PATCHES_COALESCE_MICRO_STEPS``): ``added`` (default), ``upstream``.
    - ``lost_gradients`` (``DS_PATCHES_COALESCE_LOST_GRADIENTS``): ``warn`` (default),
      ``accumulate``, ``silent``.

Upstream
    pull requests 7992 (the method, 0.19.1), 7981 (offload, 0.19.0), 7665 (``loss.backward()``,
    0.18.3).

Remove it when
    every release you use has the method, and its exit reduces nothing after an exception.
"""
