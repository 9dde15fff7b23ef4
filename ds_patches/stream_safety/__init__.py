"""ZeRO gradients that cross CUDA streams under overlap_comm: no race, and no needless wait.

What
    ``"overlap_comm": true`` reduces gradients on a stream beside the backward's. A tensor that is
    written on one stream and read on another needs a wait, and its memory must not be handed on
    before both are done. DeepSpeed has missed one or the other again and again; training then turns
    NaN, or differs from run to run. This patch brings each fix to the releases that lack it.

Why
    ==================== ================================================= ===================
    part                 what goes wrong                                   DeepSpeed
    ==================== ================================================= ===================
    ``ping_pong``        ZeRO-1/2: one of the two buffers of a bucket is   0.17.2 to 0.18.4
                         used over and over, and overwritten while it is
                         reduced (0.17.5 on: safe, and without overlap)
    ``zero3_producer``   ZeRO-3: the reduction waits for the default       up to 0.18.7
                         stream, not for the one that the backward is on
    ``zero3_gather``     ZeRO-3: the next forward may gather before the    all; where the
                         step has written                                  throughput timer is
                                                                           off, and up to
                                                                           0.17.5
    ``record_stream``    ZeRO-1/2: a gradient that fits no bucket is freed all; from 0.19.0 on
                         while it is reduced                               only on ranks that own
                                                                           no part of it
    ``producer_streams`` ZeRO-1/2: the reduction waits for one of several  up to 0.19.2
                         streams that gradients come from, as under
                         ``torch.compile``
    ``buffer_reuse``     ZeRO-1/2: the backward waits for every queued     all
                         reduction, where only the reuse of a buffer has
                         to wait for the last reduction of it
    ==================== ================================================= ===================

How
    - The reduction stream waits for every stream that a gradient came from.
    - Whoever writes into a bucket's buffer waits for the last reduction of this very buffer, and
      for nothing else. The buffers of a bucket sit in a list that sees who takes which.
    - What the reduction reads is recorded on its stream.
    - ZeRO-3's gathers wait for each step, once.

What to know
    - ``DS_PATCHES_STREAM_SAFETY=record_stream,producer_streams`` takes these parts alone. A part
      that the release does not lack does nothing; asked for by name, it says so.
    - Devices without streams of their own, as the CPU, keep order by themselves: nothing changes
      there.
    - ZenFlow's optimizers, and ``buffer_reuse`` with CPU offload, are left to stock: they wait in a
      way of their own.
    - ``python -m ds_patches doctor --streams`` checks your torch and your GPUs.

Upstream
    pull requests 7805, 7371, 7898, 7965, 8080 (merged), issue 8364 (open), PyTorch issue 33909.

Remove it when
    your release is 0.19.3 or later and issue 8364 is closed in it.
"""
