"""DeepCompile ZeRO-3 with frames that Dynamo skips: they gather, and they train.

What
    ``"compile": {"deepcompile": true}`` with ZeRO-3, and a model that Dynamo cannot compile whole:
    a graph break inside a loop, a loop over data, a function under ``torch.compiler.disable``, a
    frame that was compiled too often. What is not compiled runs eagerly, with eager ZeRO-3's
    results; what is compiled stays DeepCompile's.

Why
    DeepCompile gathers and reduces inside its graphs, and removes every hook that does so
    elsewhere. Up to 0.19.2 a skipped frame fails with ``'weight' must be 2-D``. From 0.19.3
    DeepSpeed gathers there, and reduces nothing: parameters used in skipped frames silently do not
    train, up to 0.19.8; and in a loop with a graph break it still fails, because Dynamo compiles
    the very getter that should gather.

How
    - Inside a call of a module, eager code that reads a parameter sees a gathered tensor in its
      place, gathered once per call. The parameter itself stays partitioned, so Dynamo's guards
      never see it change, and nothing has to be released: the tensor is freed with its last user.
    - What autograd saves of such a tensor is saved as a note; the backward gathers it again, for
      one module call at a time. Its gradient is summed over all uses, averaged over the ranks in
      buckets, and added to the partition that the optimizer steps with.
    - ZeRO-3 leaf modules are gathered, and reduced, whole: ranks may use other experts.
    - DeepSpeed's own fallback is put aside for the engine, and given back by ``unapply``.
    - Compiled graphs lose gradients of their own in stock: of all but one forward where several
      come before one backward, of all but one backward where a step has several, also over one
      forward, and of parameters that two graphs share. Those add up too. ``zero_grad()`` drops what
      it drops in ``accumulation``: not the micro steps that ``engine.step()`` has counted.
    - Where a model has two graphs or more, stock runs with weights that are one step behind, from
      the seventh step on, when DeepCompile keeps parameters gathered. Here none outlives a step.

What to know
    - Up to 0.19.6 nothing tells Dynamo that a frame which it compiled for one layer is not for the
      next. There, what a skipped frame calls runs eagerly as a whole. From 0.19.7 Dynamo compiles
      it for each layer, up to its limit of 8.
    - DeepCompile measures each graph that it compiles on all ranks together: one rank that compiles
      alone hangs. Ranks do where what they see differs, as in a loop over the experts that were
      hit. So nothing within a ZeRO-3 leaf module is compiled, and graphs without parameters are
      compiled by PyTorch alone. Have other modules whose input shapes differ by rank be leaf
      modules (``set_z3_leaf_modules``).
    - ``param.register_hook`` is honoured in skipped frames. Graphs run no hooks, in stock neither,
      and skipped frames none of ``register_post_accumulate_grad_hook``: a warning names the
      parameter.
    - Whoever iterates over ``self.parameters()`` in a skipped forward sees partitioned ones, of
      shape [0], as in eager ZeRO-3 those of other modules are. Attributes are what is gathered.
    - Under ``loss.backward()`` and ``engine.backward()`` alike. If a backward raises, every
      gradient reduced since the last step is dropped, with a warning.
    - Apply it before ``engine.compile()``: an engine compiled before is left to stock, with a
      warning.
    - A function of yours that Dynamo compiles and that returns a parameter as it is returns the
      partitioned one, of shape [0]; so does a parameter handed from a compiled frame to a skipped
      one. Read it where it is used.
    - ``torch.func.grad`` and its like cannot run in a skipped frame: PyTorch does not let them
      while tensors are saved as notes.
    - Left to stock, with a warning: an offloaded optimizer, ZeRO++ quantization and secondary
      partitions, MiCS, parameters on NVMe, sequence parallelism, and AutoEP where experts are
      averaged over more ranks than hold them.
    - It is for 0.19.2 and later. On GPUs 0.19.2 and 0.19.8 were trained, and the releases between
      them were not: there it rests on the tests on CPU. On older ones no graph was ever trained
      with it. A skipped frame crashes there, and is not silently wrong.
    - After a backward that raised on one rank alone, that rank refuses the next forward: what
      DeepCompile's graphs hold of it can be dropped on all ranks together only.
    - ``with ds_patches.train_check(engine):`` around a step says what did not train.

Upstream
    issue 7942, pull requests 8059 and 8157 (merged; they gather, and reduce nothing).

Remove it when
    your release trains parameters that DeepCompile's graphs do not hold.
"""
