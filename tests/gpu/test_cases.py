"""Cases of the CPU suite on real GPUs, with streams and NCCL: against plain PyTorch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.accumulation import test_arrivals, test_division
from tests.accumulation import test_experts as of_experts
from tests.coalesce import test_blocks, test_failure, test_no_sync
from tests.harness import OVERLAP, ROUNDING, Case, World, run
from tests.zero3_retain import test_gradients

#: float32 on a GPU: other kernels for other shapes, sums in another order.
TOLERANCE = {**ROUNDING, "float32": 1e-5}
#: Tests whose cases are tables.
TABLES: tuple[Any, ...] = (
    test_gradients.test_options,
    test_gradients.test_graphs,
    test_division.test_outputs_that_lead_to_one_another,
    test_division.test_outputs_in_a_plain_dataclass,
    test_blocks.test_a_block_is_a_sum,
    test_failure.test_the_next_step_is_as_if_it_had_not_happened,
    test_no_sync.test_the_next_synced_backward_reduces_the_sum,
    of_experts.test_batches_of_one_to_three_experts,
    test_arrivals.test_two_forwards_for_one_loss,
    test_arrivals.test_a_plain_backward_is_divided_once,
    test_arrivals.test_what_was_written_in_this_step_is_stepped,
    test_arrivals.test_gradients_of_another_engines_backward_are_kept,
)


def cases() -> Iterator[Any]:
    """With communication beside the backward."""
    for test in TABLES:
        for param in (param for mark in test.pytestmark for param in mark.args[1]):
            (case,) = param.values
            zero = {**OVERLAP["zero"], **case.options.zero}
            overlapped = replace(case, options=replace(case.options, zero=zero))
            skips = [mark for mark in param.marks if mark.name == "skipif"]
            yield pytest.param(overlapped, id=f"{case.patches[-1]}-{param.id}", marks=skips)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*cases()])
def test_a_case(living_gpus: World, case: Case) -> None:
    # Overlap is stock's own race: a wrong result would be nobody's.
    patches = (*case.patches, "stream_safety")
    for outcome in living_gpus.run(run, case.script, case.options, *patches):
        assert not outcome.error, outcome
        assert outcome.difference <= TOLERANCE[case.options.dtype] < outcome.moved, outcome
        # A block that gathers once keeps them until its end.
        assert case.patches != ("zero3_retain",) or not any(outcome.available), outcome
