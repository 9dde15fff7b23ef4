"""Surroundings of an engine: none, DeepCompile's stand-in, or detected streams."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.harness.options import PLAIN, Options

RATE = 0.1
#: What a training comes to, by name.
Parameters = dict[str, Tensor]
#: How a script is run: by an engine on the CPU, under the stand-in of DeepCompile, or on the
#: streams of the race detector.
EAGER, DEEPCOMPILE, STREAMS = "eager", "deepcompile", "streams"

#: The block in which a script runs; it has the races that were seen, in the end.
Inside = Callable[[], AbstractContextManager[list[str]]]


@contextmanager
def around(on: str, **compiles: Any) -> Iterator[Inside]:
    """`compiles`: what DeepCompile's stand-in is told."""
    if on == DEEPCOMPILE:
        from tests.dc_fallback import stand_in

        with stand_in.deep_compile(**compiles):
            yield lambda: nullcontext([])
    elif on == STREAMS:
        from tests.stream_safety.races import detecting

        with detecting() as (device, detector):

            @contextmanager
            def detected() -> Iterator[list[str]]:
                with detector:
                    yield detector.races
                device.synchronize()

            yield detected
    else:
        yield lambda: nullcontext([])


def build_optimizer(model: nn.Module, options: Options, sharded: bool = False) -> Any:
    """SGD, or Muon: of one device, or, under ZeRO, one that finds its updates made."""
    if options.fused:
        from deepspeed.ops.adam import FusedAdam

        optimizer = torch.optim.SGD(trained(model, options))
        optimizer.__class__ = type("Fused", (torch.optim.SGD, FusedAdam), {})
        return optimizer
    if not options.muon:
        return torch.optim.SGD(trained(model, options))
    from deepspeed.runtime.zero.muon import muon_optimizer, original_muon

    for name, param in model.named_parameters():
        param.use_muon = param.ndim > 1 and "embed" not in name
    groups = [
        {"params": [p for p in model.parameters() if p.use_muon == whole], "use_muon": whole}
        for whole in (True, False)
    ]
    if sharded:
        return muon_optimizer.MuonWithAuxAdam(groups)
    return original_muon.SingleDeviceMuonWithAuxAdam(groups)


def trained(model: nn.Module, options: Options) -> list[dict[str, Any]]:
    params, count = [p for p in model.parameters() if p.requires_grad], len(options.rates)
    return [{"params": params[i::count], "lr": rate} for i, rate in enumerate(options.rates)]


def build_engine(
    model: nn.Module,
    config: dict[str, Any],
    mpu: Any = None,
    *,
    optimizer: Any = None,
    options: Options = PLAIN,
) -> Any:
    """`mpu`: knows the groups of ranks, where they are not the whole world.

    A configuration may name the optimizer.
    """
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules

    if leaves := getattr(model, "leaf_classes", None):
        set_z3_leaf_modules(model, list(leaves))
    arguments: dict[str, Any] = {"model_parameters": trained(model, options)}
    if "optimizer" not in config:
        arguments = {"optimizer": optimizer or build_optimizer(model, options, sharded=True)}
    # DeepSpeed takes what it reads of an optimizer's settings out of the dictionary.
    engine, *_ = deepspeed.initialize(model=model, config=deepcopy(config), mpu=mpu, **arguments)
    return engine


def compile_engine(model: nn.Module, config: dict[str, Any], backend: str = "eager") -> Any:
    engine = build_engine(model, {**config, "compile": {"deepcompile": True}})
    engine.compile(backend=backend)
    return engine


@contextmanager
def half_precision_allowed() -> Iterator[None]:
    """Allow fp16 on a CPU, which computes it slowly, so that DeepSpeed's own check refuses it."""
    from deepspeed.accelerator import get_accelerator

    dtypes = [torch.float, torch.bfloat16, torch.float16]
    fakes = {"is_fp16_supported": lambda: True, "supported_dtypes": lambda: dtypes}
    with mock.patch.multiple(get_accelerator(), **fakes):
        yield


@contextmanager
def streams() -> Iterator[None]:
    """DeepSpeed's checkpointing makes a stream, up to 0.19.7, of which the CPU has none."""
    from deepspeed.accelerator import get_accelerator

    none = property(lambda self: lambda **_: None)
    with mock.patch.object(type(get_accelerator()), "Stream", none):
        yield


def parameters(module: nn.Module) -> Parameters:
    """All of a model, which ZeRO-3 may have in parts."""
    from deepspeed.runtime.zero import GatheredParameters

    whole = {}
    for name, param in module.named_parameters():
        with GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            whole[name] = param.detach().float().clone()
    return whole
