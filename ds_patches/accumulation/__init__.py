"""Gradients of a step add up, as in PyTorch.

Use
    Apply it, and leave the training loop as it is. Between two steps, every backward then adds to
    the gradient, and a parameter that no backward reached has none. This holds at ZeRO 1, 2 and 3,
    for ``engine.backward(loss)``, and for ``engine.scale(loss).backward()`` and ``loss.backward()``
    in releases that have those. ``torch.autograd.grad`` is no backward, and its result is not
    divided. A gradient that ``safe_set_full_grad`` gives counts too, and the next backward adds to
    it. ``safe_get_full_grad`` reads zero where the step has not been, and no older step's gradient.

    A gradient is divided by the micro steps once, whichever outputs it passes on its way, also
    without ZeRO. For that each output of a forward with several gets a tensor of its own, as stock
    has it at ZeRO 3.

    At ZeRO 1 and 2 ranks may use different parameters in a step, as with the experts of a MoE model
    or a tower of one modality. A parameter that some rank used gets the sum over the ranks, divided
    by all of them, as with ``find_unused_parameters`` of PyTorch's DDP; one that none used has no
    gradient.

    ``zero3_retain`` and ``coalesce`` require this patch. Asking for one of them applies it, too.

Risks
    - **zero_grad().** PyTorch loops begin each micro step with ``zero_grad()`` and still mean to
      accumulate. So at stages 2 and 3, right after ``engine.step()`` has counted a micro step,
      ``zero_grad()`` of the engine or of its ZeRO optimizer changes nothing, as on stock. After
      another backward it drops all gradients of the step, as in PyTorch; in the middle of an
      accumulation with a warning. Stage 1 clears everything but fp32 sums, as on stock. PyTorch's
      own ``module.zero_grad()`` finds nothing to clear under ZeRO, patched or not.
    - **Errors.** If a backward raises, every gradient since the last step is dropped, with a
      warning, because part of it may have been reduced. The next forward starts clean.
      ``engine.step()`` without another backward is refused.
    - **Older forwards.** A backward over a forward of the step before is a warning at stages 1 and
      2, once an engine. PyTorch would raise, and so does ``zero3_retain`` at stage 3.
    - **Ranks that differ.** From the place where the gradients of a rank come in another order than
      in the first step, they wait for their turn, and what does not come is reduced as zero. So a
      part that rests in some steps costs its communication there, also where all ranks agree. While
      there is a parameter that no rank has used yet, the hosts meet once a backward. DeepSpeed's
      own MoE layer is left as it is.
    - **Other engines.** A backward that passes through an engine's outputs and reaches none of its
      parameters, as through a frozen discriminator, does not count among its backwards.
    - **Unused parameters.** ZeRO keeps the gradients of a group in one flat tensor. The optimizer
      steps a parameter without a gradient with zeros; momentum and weight decay still move it.
    - **Clipping.** DeepSpeed 0.19.3 and later clip to 1.0 unless ``gradient_clipping`` says
      otherwise. That is a changed default, no defect, but such a step is not PyTorch's.

Not covered
    | what | what happens |
    |---|---|
    | Muon without ``muon``, a second backward at the boundary | refused: an error with the cures |
    | ``tensor.backward()`` of what ``engine(x)`` did not return | refused, see below |
    | ZenFlow, SuperOffload and MiCS optimizers | left to stock, with a warning |
    | DeepCompile, compiled autograd | left to stock |
    | an optimizer on NVMe; stage 0, but for the division | left to stock |
    | pipelines; half precision without ZeRO | see ``pipelines``, ``half_without_zero`` |
    | ``safe_set_full_grad`` beside ``BF16_Optimizer`` | see ``zero12_gradients`` |
    | a backward inside another, bf16 with fp32 sums at stage 1, to 0.18.4 | stock's: wrong |

    The plain backward is right if a backward of an output came before it in the step, and
    ``engine.backward(tensor)`` is right for any tensor. In 0.18.3 and 0.18.4 the plain one is
    stock's: wrong, or an error.

Cost
    An ordinary step takes 0.99 to 1.07 of stock's time at ZeRO 1 and 2, and 0.90 to 0.95 at ZeRO 3,
    with ``coalesce`` and ``zero3_retain`` applied as well (docs/benchmarks.md).

Why
    Between two steps every backward adds to the gradient in PyTorch. DeepSpeed keeps the last of
    several backwards, loses micro steps, or steps with an older gradient, in silence; which,
    depends on the release, the stage and the settings.

How
    The patch watches each run of the autograd engine that reaches the engine's outputs, or the loss
    that ``engine.backward`` got. Each such run is one backward: what begins inside it belongs to
    it, and it has failed if an exception left it. What a reduction leaves is added to what the step
    has reduced before. What the step has not reached is zero when the optimizer reads it.

Upstream
    Pull requests 7665 (``loss.backward()``, 0.18.3), 7967 and 7981 (offload, 0.19.0), 7985 (bf16,
    0.19.0), 8382 (CPU, 0.19.8), 7886 (counting, 0.18.7); issues 7718, 7724, 7773, 7830,
    7837 and 8224.
"""

from ds_patches.core import handles

apply, unapply, is_applied = handles.of(__name__)
