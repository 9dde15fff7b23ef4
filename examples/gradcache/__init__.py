"""GradCache under ZeRO: a contrastive loss over a batch that is embedded in chunks.

    python -m examples.gradcache                         # two gloo ranks on this machine's CPU
    torchrun --nproc-per-node 8 -m examples.gradcache    # the GPUs of a host

The handwritten digits of scikit-learn are cut in two, and the model learns which right half belongs
to which left one. All other halves of the batch, on every rank, are negatives. So the loss needs
the embeddings of the whole batch at once; its activations it does not: each chunk has a forward and
a backward of its own, which carries the loss's gradient from embeddings to parameters. All these
backwards are one block of `engine.coalesce_grad_reduction()`.

The run is also a check. It trains at ZeRO 1, 2 and 3, stock and with a block, beside plain PyTorch
that puts the whole batch through the model at once. Its exit code is 0 only if every run with a
block has the loss curve of plain PyTorch, that curve falls, and the number of reductions is that
of one backward.

`train` is the script a user would write, `curves` are the runs that are compared.
"""
