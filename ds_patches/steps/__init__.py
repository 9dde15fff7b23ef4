"""How an engine trains: a step, its backwards and its sums, what is attached to an engine.

- `graph_task`: what a backward is, seen from inside it, and which outputs lead into its graph;
- `step`, `state`, `listener`: which backwards belong to a step, its state, what it asks of
  its gradients, and what patches do at its backwards;
- `arrivals`: a gradient that comes to a parameter again in one backward, at stages 1 and 2;
- `sums`, `zero12_sum`, `host_sum`, `bf16_sum`, `zero3_sum`: the sum of a step's gradients, by
  optimizer, and of local ones, which a block leaves on the parameters;
- `bucket_order`: in which order ranks reduce the buckets of ZeRO 1 and 2;
- `division`: a gradient is divided by the micro steps once, where it is reduced;
- `saved_view`: a view that autograd has saved, and how to make it again;
- `attached`: a patch's own state of an engine or optimizer, which dies with its owner; the engines
  whose steps are followed, and who listens to them;
- `ranks`: what ranks tell each other.

It knows `core` and `upstream`, and no patch.
"""
