"""Gradients of a step add up, as in PyTorch.

Use
    Apply it, and leave the training loop as it is. Then every backward before a step adds to the
    gradient; parameters that no backward reached are stepped with zeros. This holds at ZeRO 1, 2
    and 3, for ``engine.backward(loss)``, ``engine.scale(loss).backward()`` and
    ``loss.backward()``, as far as the release has them. A backward adds to a gradient that
    ``safe_set_full_grad`` has set. ``safe_get_full_grad`` returns zero for parameters that this
    step has not reached.

    A gradient is divided by the micro steps once, however many outputs of engines it passes, also
    without ZeRO. Outputs may be in a plain dataclass. The result of ``torch.autograd.grad`` is not
    divided. With ``managed_gradient_accumulation: false`` a step lasts until ``engine.step()``.

    At ZeRO 1 and 2 ranks may use different parameters in a step, such as experts of a MoE model or
    a tower of one modality. A parameter that some ranks used gets their sum, divided by the number
    of all ranks, as with ``find_unused_parameters`` of PyTorch's DDP.

    ``zero3_retain`` and ``coalesce`` require this patch, and apply it, too.

Risks
    - **zero_grad().** Many PyTorch loops begin each micro step with ``zero_grad()``. So at stages 2
      and 3, right after ``engine.step()`` has counted a micro step, ``zero_grad()`` of the engine
      or its optimizer changes nothing, as on stock. After another backward it drops all gradients
      of the step, as in PyTorch. At stage 1 it always drops them, but not fp32 sums, as on stock. A
      warning says if counted micro steps are dropped. ``module.zero_grad()`` has no effect under
      ZeRO, patched or not.
    - **Errors.** If a backward raises, every gradient since the last step is dropped, with a
      warning, because part of it may have been reduced. ``engine.step()`` is refused without
      another backward, and at a boundary without reduced gradients.
    - **Older forwards.** A backward over a forward from before the last step gives a warning at
      stages 1 and 2, once for each engine. PyTorch raises; so does ``zero3_retain`` at stage 3.
    - **Ranks that differ.** Gradients are reduced in the order of the first step. A gradient that
      comes early waits; a missing one is reduced as zeros. So parts of the model that a step does
      not use are communicated, too. Until every parameter has been used on some rank, the
      hosts wait for each other once in each backward. DeepSpeed's own MoE layer is left to stock.
    - **Applied late.** A step that has begun stays stock's until ``engine.step()`` ends it. A block
      of ``coalesce`` cannot be opened in it.
    - **Initialized twice.** If a model has two engines, each takes the gradients of its own
      backwards only, and steps from its own copy of the weights, as on stock. A warning says so.
    - **Other engines.** A backward that passes through an engine's outputs but reaches none of its
      parameters, as through a frozen discriminator, is not a backward of this engine.
    - **Unused parameters.** ZeRO keeps the gradients of a group in one flat tensor, so the
      optimizer steps an unused parameter with zeros; momentum and weight decay still move it.
    - **Clipping.** DeepSpeed 0.19.3 and later clip to 1.0 by default, and PyTorch does not.

Not covered
    | what | what happens |
    |---|---|
    | Muon without ``muon``, a second backward at the boundary | refused: an error with the cures |
    | ``tensor.backward()`` of what ``engine(x)`` did not return | refused, see below |
    | ZenFlow, SuperOffload and MiCS optimizers | left to stock, with a warning |
    | DeepCompile; compiled autograd, from an engine's first call under it on | left to stock |
    | an optimizer on NVMe; stage 0, except the division by micro steps | left to stock |
    | pipelines; half precision without ZeRO | see ``pipelines``, ``half_without_zero`` |
    | ``safe_set_full_grad`` beside ``BF16_Optimizer`` | see ``zero12_gradients`` |
    | a dataclass of outputs, plain backward, up to 0.18.2 | left to stock |
    | a backward inside another, bf16 with fp32 sums at stage 1, up to 0.18.4 | as on stock: wrong |

    ``engine.backward(tensor)`` is right for any tensor. ``tensor.backward()`` of such a tensor is
    right if a backward of an output came before it in the step. In 0.18.3 and 0.18.4 it is as on
    stock: wrong, or an error.

Cost
    With all patches an ordinary step of a Llama took 1.02 times stock's time at ZeRO 1 (95 %
    confidence: 0.98 to 1.04), and 0.95 times with a billion parameters at ZeRO 3 (0.91 to 1.02)
    (docs/benchmarks.md).

Why
    In PyTorch every backward before a step adds to the gradient. DeepSpeed silently keeps only the
    last of several backwards, loses micro steps, or steps with an older gradient, depending on
    release, stage and settings.

How
    A backward begins when autograd reaches an output of the engine or the loss of
    ``engine.backward``, and ends with that run of autograd; a backward that begins inside it
    belongs to it. Each reduced gradient is added to the sum of the step. Before the optimizer
    reads the gradients, those that the step has not reached are set to zero.

Upstream
    Pull requests 7665 (``loss.backward()``, 0.18.3), 7967 and 7981 (offload, 0.19.0), 7985 (bf16,
    0.19.0), 8382 (CPU, 0.19.8), 7886 (counting, 0.18.7); issues 7718, 7724, 7773, 7830,
    7837 and 8224.
"""

from ds_patches.core import api

apply, unapply, is_applied = api.of(__name__)
