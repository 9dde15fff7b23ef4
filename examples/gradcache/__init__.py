"""GradCache under ZeRO: a contrastive loss over a batch that is embedded in chunks.

    python -m examples.gradcache                         # two gloo ranks on this machine's CPU
    torchrun --nproc-per-node 8 -m examples.gradcache    # the GPUs of a host

The handwritten digits of scikit-learn are cut in two, and the model learns which right half belongs
to which left half. All other halves of the batch, on every rank, are negatives. So the loss needs
the embeddings of the whole batch at once, but not its activations: each chunk has its own forward
and backward, which propagates the loss's gradient from embeddings to parameters. All these
backwards are one block of `engine.coalesce_grad_reduction()`.

The run is also a check. It trains at ZeRO 1, 2 and 3, stock and with a block, and compares with
plain PyTorch on the whole batch at once. Its exit code is 0 only if every run with a block has the
loss curve of plain PyTorch, that curve falls, and the number of reductions is that of one backward.

`train` is the script that a user would write; `curves` runs and compares.
"""
