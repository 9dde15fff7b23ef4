"""N backwards, one gradient reduction.

Use
    Put the forwards and backwards into the block, then step:

        with engine.coalesce_grad_reduction():
            for chunk in chunks:
                engine.backward(loss_of(engine(chunk)))
        engine.step()

    Gradients add up on the parameters inside, and are reduced once when the block ends. This holds
    at ZeRO 1, 2 and 3 on every release.

    ``with engine.no_sync():`` works at stages 2 and 3 too, as in DistributedDataParallel. A
    backward that runs others inside it, as a cached loss does, ends with one reduction without a
    block.

    docs/coalesce-in-practice.md has GradCache and Accelerate.

Gathers at stage 3
    A block gathers each parameter once, if all parameters together are no more elements than
    ``stage3_max_live_parameters`` (10**9 unless the configuration says otherwise). Every rank then
    holds a whole copy of them until the block ends, in their own precision: set that limit lower
    where this is too much. The first forward and backward run by the module hooks that gather, and
    the others without. ``status()`` says which way was taken, and why.

    ZeRO++ secondary partitions, parameters on NVMe, quantized weights and
    ``stage3_module_granularity_threshold`` are gathered as DeepSpeed does, in each forward and
    backward.

If something raises
    - The block drops its gradients, reduces nothing, restores flags and hooks, and lets the
      exception through. Training may go on with the next block.
    - Do not catch it inside: the block would still end in a RuntimeError, and ``accumulation``
      drops all gradients of the step.
    - The other ranks raise ``OtherRankFailed``, with the number and the error of the rank that
      raised.
    - At stage 3, if one rank raises before all is gathered, the others wait in their next gather
      until the process group's timeout.

no_sync()
    - Inside, gradients stay on their parameters. The next backward outside, at the gradient
      accumulation boundary, reduces their sum in one pass.
    - Until then every rank keeps whole gradients, in the precision of the parameters.
    - Ranks do not meet here. Each step needs one reduction on every rank, and at stage 3 as many
      backwards.
    - After an exception of other code the gradients stay, as in DistributedDataParallel.
      ``engine.zero_grad()`` drops them.
    - ``engine.step()`` inside counts a micro step, as Accelerate up to 1.7 calls it. At the
      boundary it is an AssertionError. Outside, before what waits is reduced, it is a RuntimeError.
    - A loss is divided by gradient_accumulation_steps there too, as Accelerate expects. Stock up to
      0.18.2 leaves that out.
    - Stage 1 without ``overlap_comm``, and engines that cannot have a block, keep stock's.

Risks
    - **Micro steps.** With gradient_accumulation_steps above 1 a block is one micro step, and its
      losses are divided. A boundary that was set inside holds after it.
    - **Reading gradients.** Inside a block ``safe_get_full_grad`` gives this rank's own, unreduced,
      as with DeepSpeed's own method.
    - **Precision.** Gradients add up in the precision of the parameters, as on any PyTorch
      parameter. At stage 1 with an offloaded optimizer, a low precision model and fp32 sums, they
      add up in fp32.
    - **Ranks that differ.** A parameter without a gradient counts as zeros, also where only some
      ranks have one.

Not covered
    | what | what happens |
    |---|---|
    | ``engine.step()`` in a block; a block in a block of the same engine | AssertionError |
    | a block in ``no_sync()``, or the reverse | AssertionError |
    | ``managed_gradient_accumulation=False`` | AssertionError |
    | stage 0, pipelines, DeepCompile, AutoEP folding | NotImplementedError |
    | BF16_Optimizer, FP16 wrappers, ZenFlow, SuperOffload, MiCS | NotImplementedError |
    | an optimizer on NVMe | NotImplementedError |

Cost
    At ZeRO 1 and 2 a block takes as long as DeepSpeed's own. At ZeRO 3 it takes 0.47 to 0.54 of
    that where it gathers once, and 0.99 to 1.11 where it does not (docs/benchmarks-coalesce.md).

Why
    DeepSpeed has the method from 0.19.1 on. Its own reduces what is there when something inside
    raises, so half a block becomes a step; if one rank alone raised, the others wait until a
    timeout. And ``no_sync()`` is an AssertionError at stages 2 and 3, which ends
    ``accelerator.accumulate()``.

How
    - The patch adds the method where it is missing, and replaces it where it is not.
    - DeepSpeed's own reducer takes what has added up. The number of collectives does not depend on
      N.
    - Ranks meet before they reduce, so that each knows whether another raised: in a file in
      ``/dev/shm``, if one host has all of them (``LOCAL_WORLD_SIZE`` equals ``WORLD_SIZE``), or
      else in the process group's store. More than 4095 do not meet.
    - ``accumulation`` knows what a backward is, and adds.

Upstream
    Pull request 7992 (the method, 0.19.1).
"""

from ds_patches.core import handles

apply, unapply, is_applied = handles.of(__name__)
