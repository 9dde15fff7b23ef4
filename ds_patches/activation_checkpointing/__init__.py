"""Several backwards over one forward that DeepSpeed's own checkpointing recomputes.

Use
    Apply it, and leave the script as it is. A forward under ``deepspeed.checkpointing.checkpoint``
    or ``non_reentrant_checkpoint`` may then have any number of backwards, as with PyTorch's
    checkpoint: at every ZeRO stage, also with ``partition_activations``, ``checkpoint_in_cpu`` and
    contiguous buffers.

    ZeRO-3 also needs ``zero3_retain`` for several backwards, and for a single one through
    ``non_reentrant_checkpoint``. The patch requires ``accumulation``, which adds the gradients up.

Risks
    - **Functions imported before.** A module that imported one of the two functions by its name
      before the patch was applied calls stock's. So do pipelines, which have one backward.
    - **Activations on the CPU.** From 0.19.6 on, GPUs copy activations there in the background, if
      they are not partitioned. After a backward that retains its graph they stay on the GPU, as on
      stock.

Not covered
    | what | what happens |
    |---|---|
    | ``torch.autograd.grad`` | stock's: an error, as PyTorch's reentrant checkpoint raises it |
    | ``non_reentrant_checkpoint`` with activations kept elsewhere, to 0.19.5 | stock's: an error |
    | ``non_reentrant_checkpoint`` to torch 2.7 | stock's: what it has recomputed stays in memory |
    | either of them on CPU ranks, to 0.19.7 | stock's: an error, as it asks for a stream |

Cost
    Each backward recomputes. Memory is that of one backward: the backward that does not retain the
    graph frees what the forward saved. Up to torch 2.5 nothing tells which one that is, and it is
    freed with the loss.

Why
    ``checkpoint`` frees what it has saved in the first backward, even if the graph is retained; the
    second has nothing to recompute from. ``non_reentrant_checkpoint`` recomputes in the first
    backward only. If the graph is retained, it keeps everything that it has recomputed, and at
    ZeRO-3 the weights, too.

How
    Before a backward that retains its graph the patch keeps what was saved, with the states of
    tracked random generators, and puts it back afterwards. What ``non_reentrant_checkpoint`` has
    recomputed is dropped as soon as it was used.

Upstream
    Issue 4595 is about ``non_reentrant_checkpoint`` at ZeRO-3, which ``zero3_retain`` cures. No
    issue about several backwards was found.
"""

from ds_patches.core import api

apply, unapply, is_applied = api.of(__name__)
