"""ZeRO gradients that cross CUDA streams under overlap_comm, without races.

Use
    Apply it, and leave ``"overlap_comm": true`` as it is. The patch has a part for each defect. A
    part is on where your release has the defect:

    - ``ping_pong``, 0.17.2 to 0.18.4, ZeRO-1/2: a bucket has two buffers, and only one is used. It
      is overwritten while it is reduced. From 0.17.5 on DeepSpeed waits instead, and nothing
      overlaps.
    - ``zero3_producer``, up to 0.18.7, ZeRO-3: the reduction waits for the default stream, but the
      backward may be on another one.
    - ``zero3_gather``, all, ZeRO-3: parameters may be gathered before the step has written them.
      The throughput timer, where it is on, hides this, but not in the first two steps; from 0.17.6
      on in those, too.
    - ``record_stream``, all, ZeRO-1/2: a gradient that is too large for a bucket is freed while it
      is reduced. From 0.19.0 on this happens only on ranks that own no part of it.
    - ``producer_streams``, up to 0.19.2, ZeRO-1/2: gradients may come from several streams, as
      under ``torch.compile``. The reduction waits for one of them.
    - ``buffer_reuse``, all, ZeRO-1/2: of several streams that fill a bucket, one waits for every
      queued reduction, and the others for none. Each should wait for the last one of its buffer.

    Three parts are for speed. They are off, because they make some trainings slower than stock.
    ``DS_PATCHES_STREAM_SAFETY=all`` turns them on, with up to eight buffers for a bucket.

    - ``bucket_ready``, all, ZeRO-1/2: a full bucket is reduced as soon as its gradients are there.
      On stock it waits for the next gradient.
    - ``host_wait``, all, ZeRO-1/2: at the end of a backward the host goes on. On stock it waits
      until the device has nothing left to do.
    - ``micro_steps``, 0.17.6 and later, ZeRO-2: between two micro steps the next forward waits for
      no reduction. On stock it waits for all.

    ``DS_PATCHES_STREAM_SAFETY=record_stream,producer_streams`` takes these two parts alone. If you
    name a part that is not for your release, it does nothing, and the log says so.

Risks
    - **A second stream, late.** If all gradients of the first backward come from one stream,
      DeepSpeed's own waits are enough, and the patch stops looking at each gradient. Buckets tell
      whether that still holds. So the one backward in which a second stream first appears may
      race, as every backward does on stock. Up to 0.19.2 buckets do not tell, and the patch asks
      of every gradient which stream it is on.
    - **gc.freeze()** before ``apply`` hides engines that were built before. The patch then begins
      with the end of their next backward.
    - **With parts for speed** nobody but the step may read gradients between micro steps. A hook on
      an AccumulateGrad node that comes after DeepSpeed's may find its gradient being reduced. The
      device may still reduce when ``backward`` returns, so a stream of yours has to wait for the
      current one, as ever in PyTorch. Collectives of your forward, as of experts, may run beside
      reductions.
    - **Memory, with parts for speed.** The buffers beyond two take at most 256 MiB, and nothing if
      there is no memory left. Between micro steps the gradients of one backward may stay while the
      next forward runs. PyTorch's allocator waits for them before it gives up.
    - **The throughput timer.** With ``micro_steps`` it waits for the device at both ends of a step,
      not of each micro step. What it logs is the time of all micro steps.

Not covered
    | what | what happens |
    |---|---|
    | devices without streams of their own, as the CPU | nothing to do |
    | ZenFlow's optimizers | left to stock |
    | CPU offload, or no ``contiguous_gradients`` | no ``buffer_reuse``, no part for speed |
    | a bucket whose buffers take more than 512 MiB, as by default | no ``micro_steps`` |

Cost
    By default a step took 0.98 to 1.00 of stock's time on 0.19.8 with 16384 rows, 1.00 to 1.09 with
    4096, and 0.95 to 1.19 with 256, where the host is the limit (docs/benchmarks-stream-safety.md;
    the patch has asked less of the driver since, which was not timed on two GPUs). With all parts,
    ZeRO-2 without P2P takes 0.87 to 0.97, and 1.04 to 1.12 where the host is the limit. There
    ``overlap_comm`` has nothing to hide, and ZeRO-1/2 are faster without it.

Why
    ``overlap_comm`` reduces gradients on a stream beside the backward's. If one stream writes a
    tensor and another reads it, the reader has to wait, and the memory must not be handed on before
    both are done. DeepSpeed has missed one or the other again and again. Training then turns NaN,
    or differs from run to run.

How
    - The reduction waits for every stream that a gradient came from, as far as its last gradient;
      or, where a hook of yours comes after DeepSpeed's, for what this does too.
    - Where there are several streams, whoever writes into a buffer waits for the last reduction of
      that buffer. The buffers sit in a list that sees who takes which.
    - What the reduction reads is recorded on its stream.
    - ZeRO-3's gathers wait for each step, once.
    - With the parts for speed the streams wait for each other at the end of a backward, and the
      host goes on. If no step follows, not even the streams wait: micro steps are added up on the
      reduction stream.

Upstream
    Pull requests 7805, 7371, 7898, 7965, 8080 (merged), issue 8364 (open), PyTorch issue 33909.
"""
