"""Gradients of a step add up, as in PyTorch.

What
    Between two ``zero_grad()`` or ``step()`` every backward adds to the gradient, and a parameter
    that no backward reached has none: PyTorch keeps that sentence, DeepSpeed does not. ZeRO 1, 2
    and 3, on every release, whatever calls the backward: ``engine.backward(loss)``,
    ``engine.scale(loss).backward()`` or ``loss.backward()``, where the release has those.
    ``torch.autograd.grad`` is no backward: what it returns is divided by nothing.

Why
    What an ordinary loop trains on is wrong, without a word:

    - several backwards before one step: only the last counts (stages 1 and 2 from 0.18.3 on, stage
      3 from 0.18.5 on; with an offloaded optimizer up to 0.18.9);
    - three micro steps or more with an offloaded optimizer: all but the first and the last are
      dropped (stage 2, up to 0.18.9); micro steps that the user sets apart by
      ``set_gradient_accumulation_boundary`` are, too;
    - plain micro steps: only the last counts (stage 2, 0.17.6 to 0.18.2);
    - a parameter that a step did not use is stepped again with its last gradient (stage 3, and
      offloaded optimizers; every release);
    - a sum that the last micro step does not add to is lost (stage 1 with overlap_comm);
    - ``scale_wrt_gas=False``, which Accelerate passes, is ignored (0.18.3);
    - bf16 with fp32 sums: the last micro step is not averaged over the ranks (0.18.3 to 0.18.9), or
      nothing is (stage 1 with an offloaded optimizer, up to 0.19.7);
    - what ``torch.autograd.grad`` returns at an output is divided by the micro steps (0.18.3 on);
    - on a CPU without ``contiguous_gradients`` nothing is reduced (up to 0.19.7).

How
    Each run of the autograd engine that reaches the engine's outputs, or the loss that
    ``engine.backward`` got, is a backward of its own: what begins inside it belongs to it, and it
    has failed if an exception left it. What a reduction leaves is added to what the step has
    reduced before; what the step has not reached is zero when the optimizer reads it.

What to know
    - ``zero_grad()`` of the engine or of its ZeRO optimizer drops what the step has so far, but for
      micro steps that ``engine.step()`` has counted: loops written for PyTorch begin each with
      ``zero_grad()``, and mean DeepSpeed to accumulate. A backward since then cannot be told from
      them any more; it stays too, with a warning. Stage 1 clears all, as on
      stock. PyTorch's own ``module.zero_grad()`` finds nothing to clear under ZeRO, patched or not.
    - A plain ``tensor.backward()`` of what the engine's forward did not return is refused, unless a
      backward of what it did came before; ``engine.backward(tensor)`` is right for any tensor. In
      0.18.3 and 0.18.4 the plain one is stock's, wrong or an error.
    - A backward over a forward of the step before is a warning at stages 1 and 2, once an engine:
      PyTorch would raise, as ``zero3_retain`` does at stage 3. A backward that goes through an
      engine's outputs and reaches none of its parameters, as through a frozen discriminator, is no
      backward of its steps.
    - If a backward raises, every gradient since the last step is dropped, with a warning: part of
      it may have been reduced already. The next forward starts clean; ``engine.step()`` without a
      backward since is refused.
    - ZeRO keeps the gradients of a group in one flat tensor: a parameter without a gradient is
      stepped with zeros, which an optimizer with momentum or weight decay does not ignore.
    - With Muon a second backward at the gradient accumulation boundary is refused, as each would be
      orthogonalised by itself.
    - Engines with a ZenFlow, SuperOffload or MiCS optimizer are left to stock, with a warning;
      engines under DeepCompile or compiled autograd are left to stock. Stage 0, pipelines and an
      optimizer on NVMe are out of its reach.
    - 0.19.3 and later clip to 1.0 unless ``gradient_clipping`` says otherwise: a change, and no
      defect, but a step that was PyTorch's before is not any more.

Upstream
    pull requests 7665 (``loss.backward()``, 0.18.3), 7967 and 7981 (offload, 0.19.0), 7985 (bf16,
    0.19.0), 8382 (CPU, 0.19.8), issues 7718 and 7724.

Remove it when
    your release adds up what PyTorch adds up.
"""
