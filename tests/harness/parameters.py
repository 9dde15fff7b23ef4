"""What a training comes to: the parameters of a model."""

from torch import Tensor, nn

Parameters = dict[str, Tensor]


def parameters(module: nn.Module) -> Parameters:
    """All of a model, which ZeRO-3 may have in parts."""
    from deepspeed.runtime.zero import GatheredParameters

    found = {}
    for name, param in module.named_parameters():
        with GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            found[name] = param.detach().float().clone()
    return found
