"""What is private in DeepSpeed, each fact once, and for which releases it holds.

Told apart by what an object has, and not by its release. It knows no patch: a patch asks here, and
says what is to be done.

- `classes`: those that bindings name, and that an engine's optimizer may have; `coverage`: which
  engines a patch covers; `engine`: the engine; `boundary`: its gradient accumulation boundary;
- `zero12`, `zero12_buckets`, `zero12_offload`: stages 1 and 2, by gradients, buckets, and the host;
- `zero3`, `zero3_gathers`: stage 3, by gradients, and by parameters and the modules that gather;
- `fragments`: what optimizers step with, by parameter; `accelerator`;
  `checkpointing`; `deepcompile`; `moe`.
"""
