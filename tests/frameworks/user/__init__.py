"""Scripts of users: each trains a small model by one framework, with DeepSpeed or without."""

from __future__ import annotations

from typing import Any, NamedTuple


class Trained(NamedTuple):
    """What a script comes to: what it has trained, as the framework wraps it, and its losses."""

    model: Any
    losses: list[float]
