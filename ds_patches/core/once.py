"""What is said, or settled, once for one object, whichever patch comes first.

Patches know nothing of each other, and two of them may see the same trouble. A topic is a name for
it that they agree on, such as ``lost gradients``.
"""

from __future__ import annotations

from typing import Any

_KEY = "_ds_patches_once"


def first(owner: Any, topic: str) -> bool:
    """Whether nobody has come with this topic for `owner` before; from now on somebody has."""
    topics: set[str] = vars(owner).setdefault(_KEY, set())
    if topic in topics:
        return False
    topics.add(topic)
    return True


def forget(owner: Any, topic: str) -> None:
    """As if nobody had come with this topic."""
    vars(owner).get(_KEY, set()).discard(topic)
