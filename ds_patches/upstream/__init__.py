"""What is private in DeepSpeed, each fact once, and for which releases it holds.

Told apart by what an object has, and not by its release. It knows no patch: a patch asks here, and
says what is to be done.

- `kinds`: which of DeepSpeed's optimizer wrappers an engine has; `engine`: the engine and its
  boundary; `accelerator`: streams, and waiting for them;
- `zero12`, `zero12_buckets`, `zero12_offload`: stages 1 and 2, by what waits on
  the parameters, in buckets, on the host, and how a group lies flat;
- `zero3`, `zero3_gathers`, `zero3_modules`: stage 3, by gradients, gathers and module hooks;
- `half`: the optimizer wrappers of fp16; `stepped` and `fragments`: what an optimizer steps with;
  `muon`; `moe`; `pipeline`; `checkpointing`; `streams`; `deepcompile` and `deepcompile_graphs`;
- `places`: the classes and modules that bindings name.
"""
