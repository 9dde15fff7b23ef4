"""DeepCompile ZeRO-3 with frames that Dynamo skips: they gather, and they train.

Use
    Apply it before ``engine.compile()``. With ``"compile": {"deepcompile": true}`` and ZeRO-3 a
    model then trains as under eager ZeRO-3, even if Dynamo skips a part of it: because of a
    graph break inside a loop, a loop over data, a function under ``torch.compiler.disable``, or a
    frame that was compiled too often. The skipped part runs eagerly, the rest by DeepCompile.
    ``engine.backward(loss)`` and ``loss.backward()`` both work.

    ``with ds_patches.train_check(engine):`` around a step names what did not train.

Risks
    - **Releases.** It is for 0.19.2 and later; in older ones a skipped frame crashes, and is not
      silently wrong. 0.19.2, 0.19.3, 0.19.5 and 0.19.8 were trained on GPUs, the others on CPUs.
    - **Ranks compile together.** DeepCompile measures each graph on all ranks, so a rank that
      compiles alone hangs. That happens if ranks see different shapes, as in a loop over the
      experts that were used. So nothing within a ZeRO-3 leaf module is compiled, and graphs without
      parameters are compiled by PyTorch alone. If other modules of yours have input shapes that
      differ by rank, make them leaf modules (``set_z3_leaf_modules``).
    - **Hooks.** ``param.register_hook`` works in skipped frames. As on stock, compiled graphs run
      no hooks. Skipped frames run no ``register_post_accumulate_grad_hook``. A warning names the
      parameter.
    - **Iterating.** If a skipped forward iterates over ``self.parameters()``, it sees partitioned
      parameters, of shape [0]. Read attributes, which are gathered.
    - **Passing parameters on.** A compiled function that returns a parameter returns the
      partitioned one, of shape [0]. So does a compiled frame that hands a parameter to a skipped
      one. Read the parameter where it is used.
    - **Errors.** If a backward raises, every gradient since the last step is dropped, with a
      warning. If it raised on one rank only, that rank refuses the next forward, because only all
      ranks together can drop the gradients in DeepCompile's graphs.
    - **Up to 0.19.6** everything that a skipped frame calls runs eagerly. From 0.19.7 on Dynamo
      compiles such functions for each layer anew, up to its limit of 8.

Not covered
    | what | what happens |
    |---|---|
    | an engine that was compiled before the patch was applied | left to stock, with a warning |
    | an offloaded optimizer; parameters on NVMe | left to stock, with a warning |
    | ZeRO++ quantization and secondary partitions, MiCS | left to stock, with a warning |
    | sequence parallelism | left to stock, with a warning |
    | AutoEP with experts averaged over more ranks than hold them | left to stock, with a warning |
    | ``torch.func.grad`` and its like in a skipped frame | PyTorch raises |
    | a compiled graph beside a skipped frame, with torch up to 2.7 | refused |

Cost
    On 2 H200 a step took 0.98 times stock's time if Dynamo skips nothing (noise: 0.97), and 0.57
    times eager ZeRO-3's if it skips half of the model (docs/benchmarks.md). If a step has several
    backwards, graphs add gradients, with one more small kernel for each parameter.

Why
    DeepCompile gathers and reduces inside its graphs, and removes the hooks that do so elsewhere.
    Up to 0.19.2 a skipped frame fails with ``'weight' must be 2-D``. From 0.19.3 to 0.19.8
    DeepSpeed gathers there and reduces nothing: the parameters of skipped frames silently do not
    train. In a loop with a graph break DeepSpeed still fails, because Dynamo compiles the getter
    that should gather.

    Compiled graphs lose gradients on stock, too: of several forwards before a backward, and of
    several backwards before a step, only one counts; parameters that two graphs share lose theirs.
    A model with two graphs or more runs with weights that are one step old, from the seventh step
    on. If the first evaluation comes after training, stock waits for a backward that never comes.

How
    - Inside a call of a module, eager code that reads a parameter gets a gathered tensor, once for
      each call. The parameter itself stays partitioned, so Dynamo's guards never see it change.
    - Autograd does not save such a tensor; the backward gathers it again, for one module call at a
      time. The gradient is summed over all uses, averaged over the ranks in buckets, and added to
      the partition that the optimizer steps with.
    - ZeRO-3 leaf modules are gathered and reduced as a whole: ranks may use different experts.
    - DeepSpeed's own fallback is switched off for the engine, and on again by ``unapply``.
    - Compiled graphs add gradients. ``zero_grad()`` behaves as with ``accumulation``. Nothing that
      a graph gathered stays after a step.

Upstream
    Issue 7942; pull requests 8059 and 8157 (merged; they gather, and reduce nothing).
"""

from ds_patches.core import api

apply, unapply, is_applied = api.of(__name__)
