"""N backwards, one gradient reduction.

Use
    Put the forwards and backwards into the block, then step:

        with engine.coalesce_grad_reduction():
            for chunk in chunks:
                engine.backward(loss_of(engine(chunk)))
        engine.step()

    Inside, gradients add up on the parameters; when the block ends, they are reduced once. This
    works at ZeRO 1, 2 and 3 on every release.

    ``with engine.no_sync():`` works at stages 2 and 3 too, as in DistributedDataParallel. A
    backward that runs others inside it, as a cached loss does, needs no block for one reduction.

    docs/coalesce-in-practice.md has GradCache and Accelerate.

At stage 3
    A block gathers each parameter once, if all parameters together have at most
    ``stage3_max_live_parameters`` elements (10**9 by default). Every rank then holds a whole copy
    of them, in their own precision, until the block ends. If that is too much, lower that setting:
    the block then gathers in each forward and backward, as DeepSpeed does. ``status()`` says
    whether a block gathered once, and why.

    With ZeRO++ secondary partitions, parameters on NVMe, quantized weights or
    ``stage3_module_granularity_threshold``, a block gathers as DeepSpeed does.

If something raises
    - The block drops its gradients (at stage 1 with them those of the step's earlier micro steps,
      which lie in the same place), reduces nothing, restores flags and hooks, and lets the
      exception through. Training may go on with the next block.
    - ``engine.step()`` is refused until another backward has come. A generator that is closed in a
      block leaves it as ``break`` does: nothing has failed.
    - Do not catch it inside: the block would still end in a RuntimeError, and ``accumulation``
      drops all gradients of the step.
    - If one rank alone raises, the others wait for its next block, as they would in any
      data-parallel training: let the exception end the job, or raise on all ranks.

no_sync()
    - Inside, gradients stay on their parameters. The next backward outside, at the gradient
      accumulation boundary, reduces their sum in one pass.
    - Until then every rank keeps whole gradients, in the precision of the parameters.
    - Every rank needs one reduction in each step, and at stage 3 the same number of backwards.
    - After an exception of other code the gradients stay, as in DistributedDataParallel.
      ``engine.zero_grad()`` drops them.
    - ``engine.step()`` inside counts a micro step, as Accelerate up to 1.7 expects. At the boundary
      it is an AssertionError. Outside, before the gradients are reduced, it is a RuntimeError.
    - A loss is divided by gradient_accumulation_steps inside, too, as Accelerate expects. Stock up
      to 0.18.2 does not divide it.
    - Stage 1 without ``overlap_comm``, and engines that cannot have a block, keep stock's
      ``no_sync()``.

Risks
    - **Micro steps.** With gradient_accumulation_steps above 1 a block is one micro step, and its
      losses are divided. A boundary that was set inside stays set after it.
    - **Reading gradients.** Inside a block ``safe_get_full_grad`` returns this rank's unreduced
      gradient, as with DeepSpeed's own method.
    - **Precision.** Gradients add up in the precision of the parameters, as in PyTorch. At stage 1
      with an offloaded optimizer, a low precision model and fp32 sums, they add up in fp32.
    - **Ranks that differ.** On a rank where a parameter has no gradient, it counts as zeros. At
      stages 1 and 2 a rank may have no backward at all; at stage 3 ranks gather together, and need
      the same forwards and backwards. A block in which no rank has a gradient reduces nothing.
    - **Backwards after the block.** At stage 3 a backward over a forward of a block that has ended
      gathers all parameters again, and releases them at its end.
    - **Taken back.** ``unapply()`` inside a block or ``no_sync()`` is an AssertionError.

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
    Compared with a block of DeepSpeed's own, a block takes the same time at ZeRO 1 and 2, and
    1.06 of it where the host is the limit. At ZeRO 3 it takes 0.47 to 0.58 of the time where it
    gathers once, and 1.01 where it does not (docs/benchmarks.md).

Why
    DeepSpeed has the method from 0.19.1 on. If something inside raises, DeepSpeed's method reduces
    what is there, so half a block becomes a step. And ``no_sync()``, which
    ``accelerator.accumulate()`` calls, is an AssertionError at stages 2 and 3.

How
    - The patch adds the method, or replaces DeepSpeed's.
    - DeepSpeed's own reducer takes the sums, with as many collectives as for one backward, and one
      more before it: of a flag for each parameter, whether a rank has a gradient of it. Only a rank
      that lacks one waits for the answer.
    - ``accumulation`` adds up the gradients.

Upstream
    Pull request 7992 (the method, 0.19.1).
"""

from ds_patches.core import api

apply, unapply, is_applied = api.of(__name__)
