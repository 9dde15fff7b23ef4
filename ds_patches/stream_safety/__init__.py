"""ZeRO gradients that cross CUDA streams under overlap_comm: no race, and no needless wait.

What
    ``"overlap_comm": true`` reduces gradients on a stream beside the backward's. A tensor that is
    written on one stream and read on another needs a wait, and its memory must not be handed on
    before both are done. DeepSpeed has missed one or the other again and again; training then turns
    NaN, or differs from run to run. This patch brings each fix to the releases that lack it.

Why
    By part, with the releases that have the defect:

    - ``ping_pong``, 0.17.2 to 0.18.4: ZeRO-1/2 use one of the two buffers of a bucket over and
      over, and overwrite it while it is reduced. From 0.17.5 on they wait instead, and nothing
      overlaps.
    - ``zero3_producer``, up to 0.18.7: the reduction of ZeRO-3 waits for the default stream, not
      for the one that the backward is on.
    - ``zero3_gather``, all: ZeRO-3 may gather before the step has written. The throughput timer
      hides it, where it is on, but for the first two steps; from 0.17.6 on for those, too.
    - ``record_stream``, all: ZeRO-1/2 free a gradient that is too large for a bucket while it is
      reduced. From 0.19.0 on, only on ranks that own no part of it.
    - ``producer_streams``, up to 0.19.2: the reduction of ZeRO-1/2 waits for one of several streams
      that gradients come from, as under ``torch.compile``.
    - ``buffer_reuse``, all: of several streams that fill a bucket of ZeRO-1/2, one waits for every
      queued reduction, and the others for none. Each has to wait for the last one of the buffer.

    And for speed, where you have measured that it pays; by default these are off:

    - ``bucket_ready``, all: a full bucket of ZeRO-1/2 is reduced when the next gradient is there,
      and not when its own are. The reduction stands still for the backward of one layer more.
    - ``host_wait``, all: at the end of a backward of ZeRO-1/2 the host waits until the device has
      nothing left to do, and only then begins to queue the step.
    - ``micro_steps``, 0.17.6 and later: between two micro steps of ZeRO-2 the next forward waits
      for all reductions, although no gradient is needed before the step.

How
    - The reduction stream waits for every stream that a gradient came from, as far as its last
      gradient; where a hook of yours comes to it after DeepSpeed's, for what this does, too.
    - Where gradients come from several streams, whoever writes into a bucket's buffer waits for the
      last reduction of this very buffer, and for nothing else. The buffers of a bucket sit in a
      list that sees who takes which, and there are up to eight of them.
    - Where all gradients of the first backward have come from one stream, DeepSpeed's own waits are
      enough, and nothing is done for each gradient from then on. Each bucket tells whether that
      still holds; so the backward in which a second stream first appears may race once, as each
      does in stock. Up to 0.19.2, where buckets do not tell, every gradient is looked at.
    - What the reduction reads is recorded on its stream.
    - At the end of a backward the streams wait for each other, and the host goes on, until the
      memory of one backward's gradients is still to be reduced. If no step follows, not even the
      streams wait: micro steps are added up on the reduction stream.
    - ZeRO-3's gathers wait for each step, once.

What to know
    - ``DS_PATCHES_STREAM_SAFETY=all`` adds the parts for speed: on 2 H200 without P2P some 0.87 to
      0.91 of stock's step from 4096 rows on, and up to 1.12 of it where the host is the limit
      (docs/benchmarks.md). They ask more of a program: nobody but the step may read gradients
      between micro steps, and a hook on an AccumulateGrad node that comes after DeepSpeed's may
      find its gradient being reduced.
    - ``DS_PATCHES_STREAM_SAFETY=record_stream,producer_streams`` takes these parts alone. A part
      that is not for the release does nothing; asked for by name, it says so.
    - The buffers beyond two take memory, each of ``reduce_bucket_size`` elements, but no more than
      256 MiB in all, and none where there is no memory left.
    - Between micro steps, gradients that are still to be reduced stay in memory while the next
      forward runs: no more of them than of one backward, and PyTorch's allocator waits for them
      before it gives up. ``micro_steps`` left out, they do not.
    - Devices without streams of their own, as the CPU, keep order by themselves: nothing changes
      there.
    - ZenFlow's optimizers are left to stock; with CPU offload, or gradients that are not
      contiguous, ``buffer_reuse``, ``bucket_ready``, ``host_wait`` and ``micro_steps`` are. They
      wait in a way of their own. So is ``micro_steps`` where the buffers of a bucket take more than
      512 MiB, as with the default ``reduce_bucket_size``, 5e8: they would take it twice.
    - DeepSpeed's throughput timer waits for the device twice in each micro step. With
      ``micro_steps`` it does so at the beginning and the end of a step only; what it logs is the
      time of all micro steps, without what the host did between them.
    - The device may still reduce when ``backward`` returns. A stream of your own that reads
      gradients has to wait for the current one, as ever in PyTorch; or leave ``host_wait`` out.
    - With the parts for speed, with several streams and up to 0.19.2, each gradient costs the host
      some 30 to 70 microseconds more, next to some hundreds of DeepSpeed's own. Where the host is
      what a step takes so long for, as with few tokens and fast links, ``overlap_comm`` has nothing
      to hide: ZeRO-1/2 are faster without it.
    - Collectives of your forward, as of experts or sequence parallelism, then run beside
      reductions, as those of the backward do in stock; or leave ``micro_steps`` out.

Upstream
    pull requests 7805, 7371, 7898, 7965, 8080 (merged), issue 8364 (open), PyTorch issue 33909.

Remove it when
    a DeepSpeed release waits for all of this by itself; none up to 0.19.8 does.
"""
