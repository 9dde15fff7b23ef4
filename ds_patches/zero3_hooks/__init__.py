"""ZeRO-3 gathers that leave parameters fit for training, whoever calls the model and how.

Use
    Apply it, and write nothing. These work then, as in PyTorch:

    - an evaluation under ``torch.inference_mode()``, through the engine or its module, or
      ``GatheredParameters`` in it, before and between training steps;

Risks
    None known.

Cost
    A Python call for each module in a forward.

Why
    A parameter that is gathered or released under ``torch.inference_mode()`` becomes an inference
    tensor, for good if nothing gathers it anew. Autograd refuses it later.

How
    What is gathered and released is gathered and released outside of inference mode.

Upstream
    No issue was found. Pull request 7665 is what rewrote the backward around it, in 0.18.3.
"""
