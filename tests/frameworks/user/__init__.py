"""Scripts of users: each trains a small model by one framework, with DeepSpeed or without."""

from typing import Any, NamedTuple


class Trained(NamedTuple):
    """The result of a script.

    model: as the framework wraps it.
    losses: that rank 0 has seen.
    """

    model: Any
    losses: list[float]
