"""ZeRO-3 trains on after inference_mode, after generation without hooks, and with mixed dtypes.

Use
    Apply it, and write nothing. These work then, as in PyTorch:

    - an evaluation under ``torch.inference_mode()``, through the engine or its module, or
      ``GatheredParameters`` in it, before and between training steps;
    - generation with the engine's hooks removed and added again, as TRL and Accelerate have it
      (to 0.19.1);
    - adapters of another dtype than the model's under ``deepspeed.zero.Init`` (to 0.19.2).

Risks
    None are known.

Cost
    A call of a Python function for each module at both ends of its forward.

Why
    A parameter that is gathered or released under ``torch.inference_mode()`` is an inference tensor
    until something gathers it anew. Autograd refuses it: in the forward, if it is still gathered;
    in the backward or the step, if no module gathers it.

    Hooks that are added again give each module another number. A trace that is being recorded
    knows modules by the old ones, and is of no use to the next forward.

    Persistent parameters are gathered together, as if all had the dtype of the first.

How
    Parameters are given other data outside of inference mode. An unfinished trace gets the new
    numbers. Parameters of several dtypes are gathered one by one.

Upstream
    Of inference mode no issue was found. Generation: pull request 8043. Dtypes: issue 8072, pull
    request 8073.
"""
