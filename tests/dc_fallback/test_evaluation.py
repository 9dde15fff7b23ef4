"""An evaluation that comes first after training: DeepCompile's own books, without its C++."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from packaging.version import Version

from ds_patches.dc_fallback import hooks
from tests.dc_fallback import stand_in
from tests.world import World

OFF = {"debug_log": False, "free_activation": False, "keep_all_input_tensors": False}
CONFIG = SimpleNamespace(**OFF, keep_int_input_tensors=True)


def model() -> torch.nn.Module:
    """Its parameters are told apart as ZeRO-3's are, and are whole."""
    made = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    for number, param in enumerate(made.parameters()):
        param.ds_id, param.ds_shape, param.ds_persist = number, param.shape, False
    return made


def waiting(patch: bool, inference: bool) -> tuple[list[int], list[bool]]:
    """How many backwards DeepCompile waits for, after each of training, evaluation, training.

    And which graphs have one.
    """
    from deepspeed.compile import backend

    bare = mock.patch.multiple(backend, register_custom_ops=lambda: None, next_passes=[])
    try:
        with stand_in.deep_compile(), bare:
            compile_graph = backend.make_backend("eager", CONFIG)
            if patch:
                compile_graph = hooks._watched_backend(SimpleNamespace, model, compile_graph)
            compiled = torch.compile(model(), backend=compile_graph)
            x, waits = torch.ones(2, 4), []
            for evaluates in (False, True, False):
                without = torch.inference_mode if inference else torch.no_grad
                with without() if evaluates else nullcontext():
                    loss = compiled(x).sum()
                if not evaluates:
                    loss.backward()
                waits.append(len(backend.frames_needing_bwd))
            return waits, [has for _, has in backend.graph_order_with_frame_id.get_graph_order()]
    finally:
        backend.frames_needing_bwd.clear()
        backend.unpatch_compiled_func()
        backend.graph_order_with_frame_id.clear()
        backend.frames_partitioned.clear()


@pytest.mark.core_case
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_deepcompile_waits_for_no_backward_of_an_evaluation(world: World, inference: bool) -> None:
    # Up to torch 2.11 the next backward ends the wait: it is compiled again.
    late = int(Version(torch.__version__) >= Version("2.12"))
    assert world.run(waiting, False, inference)[0] == ([0, 1, late], [True])
    assert world.run(waiting, True, inference)[0] == ([0, 0, 0], [True])
