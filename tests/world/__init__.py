"""A living two-rank gloo world on CPU, shared by every test that needs one.

The ranks are started once, by the first test that asks, and then run one case after another:

    def total(rank_weight: float) -> float:                     # a top-level function
        t = torch.full((1,), (dist.get_rank() + 1) * rank_weight)
        dist.all_reduce(t)
        return t.item()

    def test_total(world):
        assert world.run(total, 2.0) == [6.0, 6.0]              # one value per rank, in order

A test that needs nothing of pytest's own process can run there as a whole:

    @on_ranks
    @pytest.mark.parametrize("stage", [1, 2])
    def test_an_engine(stage: int) -> None: ...

With TEST_RANKS_FORK set, as `make test` has it, ranks are forks of one that has done the imports;
see `zygote`.
"""

from tests.world.ranks import RankError, WorldTimeout
from tests.world.world import World, on_ranks

__all__ = ["RankError", "World", "WorldTimeout", "on_ranks"]
