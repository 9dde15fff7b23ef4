"""DeepSpeed's private names, each in one place, with the releases that have them.

Functions here test for attributes rather than compare versions. They know of no patch: a patch
holds the policy, and calls this package to carry it out.

- `classes`: DeepSpeed's classes, by name and module; `coverage`: which engines a patch covers;
- `engine`: the engine and its backwards; `boundary`: its gradient accumulation boundary;
- `zero12`, `zero12_buckets`, `zero12_offload`: gradients of stages 1 and 2, buckets, CPU offload;
- `zero3`, `zero3_gathers`: stage 3: gradients and parameters; all-gathers and module hooks;
- `fragments`: each optimizer's fp32 weights and gradients, by parameter;
- `accelerator`; `checkpointing`: activation checkpointing; `deepcompile`; `moe`.
"""
