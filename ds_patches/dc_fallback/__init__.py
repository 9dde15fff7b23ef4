"""DeepCompile ZeRO-3 with frames that Dynamo skips: they gather, and they train.

Use
    Apply it before ``engine.compile()``. With ``"compile": {"deepcompile": true}`` and ZeRO-3 a
    model then trains as under eager ZeRO-3, although Dynamo cannot compile all of it: because of a
    graph break inside a loop, a loop over data, a function under ``torch.compiler.disable``, or a
    frame that was compiled too often. What is not compiled runs eagerly. What is compiled stays
    DeepCompile's. It makes no difference whether ``engine.backward(loss)`` or ``loss.backward()``
    runs the backward.

    ``with ds_patches.train_check(engine):`` around a step says what did not train.

Risks
    - **Which releases.** It is for 0.19.2 and later. 0.19.2, 0.19.3 and 0.19.8 were trained on
      GPUs; for the releases between them there are tests on CPU alone. On older ones no graph was
      ever trained with it. A skipped frame crashes there, and is not silently wrong.
    - **Ranks compile together.** DeepCompile measures each graph on all ranks, so a rank that
      compiles alone hangs. That happens where ranks see different shapes, as in a loop over the
      experts that were hit. So nothing within a ZeRO-3 leaf module is compiled, and graphs without
      parameters are compiled by PyTorch alone. If other modules of yours have input shapes that
      differ by rank, make them leaf modules (``set_z3_leaf_modules``).
    - **Hooks.** ``param.register_hook`` works in skipped frames. Graphs run no hooks, on stock
      neither, and skipped frames none of ``register_post_accumulate_grad_hook``. A warning names
      the parameter.
    - **Iterating.** If a skipped forward iterates over ``self.parameters()``, it sees partitioned
      parameters, of shape [0]. Eager ZeRO-3 does the same to those of other modules. Read
      attributes, which are gathered.
    - **Passing parameters on.** A compiled function that returns a parameter returns the
      partitioned one, of shape [0]. The same goes for a parameter that a compiled frame hands to a
      skipped one. Read it where it is used.
    - **Errors.** If a backward raises, every gradient since the last step is dropped, with a
      warning. If it raised on one rank alone, that rank refuses the next forward: only all ranks
      together can drop what DeepCompile's graphs hold of it.
    - **Up to 0.19.6** nothing tells Dynamo that a frame which it compiled for one layer is not for
      the next. What a skipped frame calls runs eagerly there, as a whole. From 0.19.7 on Dynamo
      compiles it for each layer, up to its limit of 8.

Not covered
    | what | what happens |
    |---|---|
    | an engine that was compiled before the patch was applied | left to stock, with a warning |
    | an offloaded optimizer; parameters on NVMe | left to stock, with a warning |
    | ZeRO++ quantization and secondary partitions, MiCS | left to stock, with a warning |
    | sequence parallelism | left to stock, with a warning |
    | AutoEP, if experts are averaged over more ranks than hold them | the same |
    | ``torch.func.grad`` and its like in a skipped frame | PyTorch raises |
    | a compiled graph beside a skipped frame, with torch to 2.7 | NotImplementedError |

Cost
    In one round on 2 H200, a model of which Dynamo skips half took 0.54 of eager ZeRO-3's time, and
    one that it skips whole took 0.56. Where it skips nothing the step took 0.96 of stock's
    (docs/benchmarks-dc-fallback.md).

Why
    DeepCompile gathers and reduces inside its graphs, and removes every hook that does so
    elsewhere. Up to 0.19.2 a skipped frame fails with ``'weight' must be 2-D``. From 0.19.3 on
    DeepSpeed gathers there and reduces nothing: up to 0.19.8 the parameters of skipped frames
    silently do not train. In a loop with a graph break it still fails, because Dynamo compiles the
    very getter that should gather.

    Compiled graphs lose gradients of their own on stock: of all but one forward before a backward,
    of all but one backward before a step, and of parameters that two graphs share. And a model with
    two graphs or more runs with weights that are one step old, from the seventh step on, when
    DeepCompile keeps parameters gathered. And an evaluation that first comes after training leaves
    stock waiting for its backward, which never comes.

How
    - Inside a call of a module, eager code that reads a parameter gets a gathered tensor, once for
      each call. The parameter itself stays partitioned, so Dynamo's guards never see it change.
      The tensor is freed with its last user.
    - Where autograd would save such a tensor, it saves a note, and the backward gathers it again,
      for one module call at a time. The gradient is summed over all uses, averaged over the ranks
      in buckets, and added to the partition that the optimizer steps with.
    - ZeRO-3 leaf modules are gathered and reduced as a whole: ranks may use different experts.
    - DeepSpeed's own fallback is put aside for the engine, and given back by ``unapply``.
    - Compiled graphs are told to add. ``zero_grad()`` drops what it drops under ``accumulation``.
      Nothing that a graph gathered outlives a step.

Upstream
    Issue 7942; pull requests 8059 and 8157 (merged; they gather, and reduce nothing).
"""

from ds_patches.core import handles

apply, unapply, is_applied = handles.of(__name__)
