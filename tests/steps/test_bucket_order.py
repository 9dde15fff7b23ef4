"""Ranks as threads, with DeepSpeed's own buckets: all that comes is reduced once, on all alike."""

import threading
from random import Random
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, IPGBucket
from torch import Tensor

from ds_patches.core.errors import Refused
from ds_patches.core.layer import Layer
from ds_patches.steps.arrivals import ReducedGradients
from ds_patches.steps.bucket_order import BucketOrder
from ds_patches.steps.sums import GradientSum
from ds_patches.upstream.zero12_buckets import ReduceBuckets

#: What comes to a rank in one backward: the numbers of parameters, in turn.
Arrivals = list[int]


class Ranks:
    """Values that the threads exchange."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.given: list[Any] = [None] * size
        self.here = threading.local()

    def exchange(self, kind: Any, value: Any) -> list[Any]:
        """A collective: return what all ranks gave. They have to be in the same one."""
        self.given[self.here.rank] = kind, value
        self.barrier.wait()
        kinds, values = zip(*self.given, strict=True)
        self.barrier.wait()
        assert kinds.count(kind) == len(kinds), f"ranks are in different collectives: {kinds}"
        return list(values)


class Order(BucketOrder):
    ranks: Ranks

    def _any_rank(self, flag: bool) -> bool:
        return any(self.ranks.exchange("any", flag))

    def _same_on_all_ranks(self, keys: Any, is_final: bool = False) -> bool:
        first, *others = self.ranks.exchange("all have", (keys, is_final))
        return others.count(first) == len(others)

    def _all_gather(self, order: Any) -> list[Any]:
        return self.ranks.exchange("everyones", order)


class Optimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's reduction of one rank, and the layers of `Zero12Sum` around it.

    sizes: those of the parameters. Each belongs to the rank of its number.
    """

    zenflow = cpu_offload = use_grad_accum_attribute = has_moe_layers = False
    _offload_gradient_safety_enabled = _coalesce_grad_reduction = ready_for_gradients = False
    autoep_folding_tp_group = dp_process_group = grads_in_partition = None
    partition_gradients = contiguous_gradients = True
    micro_step_id, reduction_stream = -1, None
    dtype = gradient_accumulation_dtype = torch.float32

    def __init__(self, ranks: Ranks, rank: int, sizes: list[int], **options: Any) -> None:
        vars(self).update(options)
        self.ranks = ranks
        self.params = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
        self.bit16_groups, self.ipg_buckets = [self.params], {self.dtype: IPGBucket()}
        self.param_id = {id(param): number for number, param in enumerate(self.params)}
        for number, param in enumerate(self.params):
            param.param_idx_in_group = number
        own = [number % len(ranks.given) == rank for number in range(len(sizes))]
        self.is_param_in_current_partition = own
        self.params_in_partition = [
            [p for p, is_own in zip(self.params, own, strict=True) if is_own]
        ]
        self.params_already_reduced = [False] * len(sizes)
        self.extra_large_param_to_reduce, self.previous_reduced_grads = {}, {}
        buckets = ReduceBuckets(self)
        self._order = Order(buckets)
        self._order.ranks = ranks
        self._reduced_gradients = ReducedGradients(buckets, self._order, GradientSum())
        Layer(self, "reduce_ipg_grads", self._reduced_gradients.reduce)

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def get_param_comm_dtype(self, param: Any) -> torch.dtype:
        return self.dtype

    def report_ipg_memory_usage(self, *_: Any) -> None: ...

    def average_tensor(self, tensor: Tensor, *_: Any) -> None:
        keys = [*self.ipg_buckets[self.dtype].params]
        tensor.copy_(sum(self.ranks.exchange(keys, tensor.clone())))  # type: ignore[arg-type]

    def backward(self, arrivals: Arrivals) -> dict[int, float]:
        """Return the sums that this rank has, of gradients which are powers of 16 of the ranks."""
        self._reduced_gradients.begin_backward()
        for number in arrivals:
            param = self.params[number]
            gradient = torch.full_like(param, 16.0**self.ranks.here.rank)
            param.grad = gradient if param.grad is None else param.grad.add_(gradient)
            self.process_gradients(param, 0)
        self.setup_buckets()
        self._reduced_gradients.begin_epilogue()
        self.reduce_ipg_grads()
        self.params_already_reduced = [False] * len(self.params)
        sums = {}
        for param in self.params_in_partition[0]:
            values = [0.0] if param.grad is None else param.grad.unique().tolist()
            (sums[self.get_param_id(param)],) = values
        self._release_ipg_buffers()
        self._clear_param_grad_only()
        return sums


def run(sizes: list[int], backwards: list[list[Arrivals]], **options: Any) -> list[Any]:
    """Run backwards, each of what comes on each rank; return each rank's error, or None."""
    ranks, errors = Ranks(len(backwards[0])), [None] * len(backwards[0])

    def train(rank: int) -> None:
        ranks.here.rank = rank
        try:
            with torch.no_grad():
                optimizer = Optimizer(ranks, rank, sizes, **options)
                for come in backwards:
                    for number, actual in optimizer.backward(come[rank]).items():
                        counts = [arrivals.count(number) for arrivals in come]
                        wanted = sum(16.0**rank * count for rank, count in enumerate(counts))
                        assert actual == wanted, (number, actual, wanted)
        except BaseException as error:
            errors[rank] = error
            ranks.barrier.abort()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(len(errors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def some_of(random: Random, arrivals: Arrivals) -> Arrivals:
    return random.sample(arrivals, random.randint(0, len(arrivals)))


def in_turn(random: Random, most: Arrivals) -> Arrivals:
    """Often as it is, else with some missing, or in another order."""
    fewer = [number for number in most if random.random() < 0.8]
    return random.choice([most, fewer, some_of(random, most)])


@pytest.mark.parametrize(("stage", "overlaps"), [(1, True), (2, False), (2, True)])
@pytest.mark.parametrize("seed", range(20))
def test_no_rank_brings_more_than_one_did_at_first(seed: int, stage: int, overlaps: bool) -> None:
    random = Random(seed)
    sizes = random.choices(range(1, 9), k=random.randint(2, 7))
    most = random.choices(range(len(sizes)), k=random.randint(1, 12))
    others = [[in_turn(random, most) for _ in range(3)] for _ in range(4)]
    errors = run(
        sizes,
        [[most, *others[0][1:]], *others],
        reduce_bucket_size=random.choice([1, 4, 8, 16, 1000]),
        partition_gradients=stage == 2,
        overlap_comm=overlaps,
    )
    assert not any(errors), errors


def test_new_to_all_ranks_and_overflows_the_last_bucket_on_one() -> None:
    backwards: list[list[Arrivals]] = [[[0], [0]], [[0, 1], []], [[1, 0], [0]]]
    assert not any(run([1, 1], backwards, reduce_bucket_size=1, overlap_comm=False))


def test_more_often_than_before() -> None:
    backwards = [[[0, 1], [0, 1]], [[0, 1, 0], [0, 1]]]
    assert not any(run([1, 1], backwards, reduce_bucket_size=2, overlap_comm=False))
    error, _ = run([1, 1], backwards, reduce_bucket_size=1, overlap_comm=False)
    assert isinstance(error, Refused)
    assert "more often" in str(error)
