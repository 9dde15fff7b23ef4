"""Which patch answers for a topic at one object, so that two that see the same trouble say it once.

Patches know nothing of each other. A topic is a name that they agree on, such as
``lost gradients`` of an optimizer.
"""

from __future__ import annotations

from typing import Any

_KEY = "_ds_patches_claims"


def claim(owner: Any, topic: str, by: str) -> None:
    """From now on `by` answers; who did before does not."""
    vars(owner).setdefault(_KEY, {})[topic] = by


def holder(owner: Any, topic: str) -> str | None:
    """Who answers; None if nobody has claimed it."""
    claims: dict[str, str] = vars(owner).get(_KEY, {})
    return claims.get(topic)


def release(owner: Any, topic: str, by: str) -> None:
    """Let go of what `by` holds."""
    if holder(owner, topic) == by:
        del vars(owner)[_KEY][topic]
    if not vars(owner).get(_KEY, True):
        del vars(owner)[_KEY]
