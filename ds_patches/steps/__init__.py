"""Steps, backwards and gradient sums of an engine, and the patches' state of it.

- `graph_task`: a backward as a run of the autograd engine; what leads to it, and what it saves;
- `step`, `state`: a step's backwards and states, and the patches' callbacks;
- `arrivals`: at stages 1 and 2, several gradients of one parameter in one backward;
- `sums`, `zero12_sum`, `host_sum`, `bf16_sum`, `zero3_sum`: the sum of a step's gradients, by
  optimizer, and of local gradients, which a block leaves unreduced on the parameters;
- `bucket_order`: the order in which the ranks reduce the buckets of ZeRO 1 and 2;
- `division`: the division of gradients by the micro steps, once, where they are reduced;
- `gather_once`: ZeRO 3 with all parameters gathered once;
- `attached`: a patch's state of an engine or optimizer;
- `tracking`: the tracked engines, their listeners, and engines of the same parameters;
- `ranks`: flags that ranks reduce, and their rendezvous in the store.

Imports `core` and `upstream`, and no patch.
"""
