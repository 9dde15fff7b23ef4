"""ZeRO gradients that cross CUDA streams under overlap_comm, without races.

Use
    Apply it, and leave ``"overlap_comm": true`` as it is. It cures these defects:

    - 0.17.2 to 0.18.4, ZeRO-1/2: a bucket has two buffers, and only one is used. It is overwritten
      while it is reduced. From 0.17.5 on DeepSpeed waits instead, and nothing overlaps.
    - Up to 0.18.7, ZeRO-3: the reduction waits for the default stream, but the backward may run on
      another one.
    - All releases, ZeRO-3: parameters may be gathered before the step has written them. If the
      throughput timer is on, it hides this, before 0.17.6 only from the third step on.
    - All releases, ZeRO-1/2: a gradient that is too large for a bucket is freed while it is
      reduced. From 0.19.0 on this happens only on ranks that own no part of it, or on all of them
      where ``reduce_scatter`` is off.
    - Up to 0.19.2, ZeRO-1/2: gradients may come from several streams, as under ``torch.compile``,
      but the reduction waits for only one of them.
    - All releases, ZeRO-1/2: if several streams fill a bucket, one waits for every queued
      reduction, and the others for none. Each should wait for the last one of its buffer.

Risks
    - **A second stream, late.** If all gradients of the first backward come from one stream, the
      patch stops checking each gradient, and checks each bucket instead. The first backward with a
      second stream may then race, as every backward does on stock. Before 0.19.3 DeepSpeed does not
      record which streams filled a bucket, so the patch checks every gradient.
    - **gc.freeze()** before ``apply`` hides engines that exist already. The patch then begins after
      their next step.

Not covered
    | what | what happens |
    |---|---|
    | devices without streams, such as the CPU | nothing to do |
    | ZenFlow's optimizers | left to stock |
    | CPU offload, or no ``contiguous_gradients`` | the last of these defects stays |

Cost
    A step took 1.02 of stock's time on 0.19.8, and stock against itself 1.04
    (docs/benchmarks.md). From 0.19.3 on, one call of Python for each reduce bucket;
    before, some for each gradient.

Why
    ``overlap_comm`` reduces gradients on another stream than the backward's. If one stream writes a
    tensor and another reads it, the reader has to wait, and the memory must not be reused before
    both are done. Where DeepSpeed does not see to this, training turns NaN, or differs from run to
    run.

How
    - The reduction waits for every stream that a gradient came from.
    - Several streams all wait, at each reduction, for the reductions before it, one of which has
      read the buffer that is filled next.
    - What the reduction reads is recorded on its stream.
    - ZeRO-3's gathers wait for each step, once.

Upstream
    Pull requests 7805, 7371, 7898, 7965, 8080 (merged), issue 8364 (open), PyTorch issue 33909.
"""

from ds_patches.core import api

apply, unapply, is_applied = api.of(__name__)
