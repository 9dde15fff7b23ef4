"""Training with overlap_comm, as the race detector sees it: a race is a wrong value elsewhere."""

from typing import Any

from tests.harness.surroundings import STREAMS
from tests.scripts.declared import RIGHT, script
from tests.stream_safety.on_streams import OVERLAPPED, batch

FP32_SUMS = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    # The throughput timer waits for the device now and then, and hides what comes before it.
    "timers": {"throughput": {"enabled": False, "synchronized": False}},
}
#: So that steps are far larger than what half precision rounds.
SCALE = 30.0
ON_STREAMS: dict[str, Any] = {"on": STREAMS, "model": "streams"}
SUMS: dict[str, Any] = {**ON_STREAMS, "settings": FP32_SUMS, "zero": OVERLAPPED, "tolerance": 2e-2}


def backward(trainer: Any, step: int, micro: int) -> None:
    trainer.backward(SCALE * trainer(batch(3 * step + micro)).square().mean())


@script({2: RIGHT}, micro_steps=2, costs={2: "the detector follows each reduced gradient"}, **SUMS)
def overlapped(trainer: Any, step: int, micro: int) -> None:
    """Micro steps, and nothing else."""
    backward(trainer, step, micro)


@script({2: RIGHT}, micro_steps=2, at_rest=False, **SUMS)
def gradients_read_between_micro_steps(trainer: Any, step: int, micro: int) -> None:
    """``safe_get_full_grad`` before the step."""
    backward(trainer, step, micro)
    [grad.norm() for grad in trainer.full_grads() if grad is not None]


@script({2: RIGHT}, micro_steps=2, at_rest=False, **SUMS)
def offloaded_between_micro_steps(trainer: Any, step: int, micro: int) -> None:
    """``offload_states`` before the step."""
    backward(trainer, step, micro)
    trainer.offload()


@script({2: RIGHT}, micro_steps=2, at_rest=False, **SUMS)
def boundary_set_late(trainer: Any, step: int) -> None:
    """The program knows after a backward that it was the last, as when the data end."""
    trainer.boundary(False)
    backward(trainer, step, 0)
    backward(trainer, step, 1)
    trainer.boundary(True)
