"""Do this torch and these GPUs hand tensors from stream to stream? `doctor --streams` asks.

Memory that is given up on the host may be handed out again while a kernel on another stream has
yet to read it. The caching allocator knows of such a reader only if it was told, by
`record_stream`; waiting on an event is not enough. Where that is missed, results differ now and
then, often in their last bits: PyTorch issue 33909.

So a small MLP, pipelined over the GPUs, is trained with a CUDA stream for each of its stages
(training.py). It does what a program has to do: the reader waits for the writer, and is recorded
(lanes.py); what autograd does in the backward is PyTorch's. The same training without streams of
its own is the reference, and outputs, gradients and weights must be equal to it to the bit, run
after run (comparison.py, trial.py).

Plain PyTorch: neither DeepSpeed nor a patch has a part in it.
"""
