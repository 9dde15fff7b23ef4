"""Hooks that a block takes off, and puts back to their places."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ds_patches.coalesce.suspended_hooks import SuspendedHooks


def test_hooks_come_back_to_their_places() -> None:
    said: list[str] = []

    def say(word: str, *_: Any) -> None:
        said.append(word)

    module = torch.nn.Linear(1, 1)
    handles = [module.register_forward_pre_hook(partial(say, word)) for word in "abcd"]
    suspended = SuspendedHooks([handles[0], handles[2]])
    module(torch.ones(1))
    handles[3].remove()
    module.register_forward_pre_hook(partial(say, "e"))
    module(torch.ones(1))
    suspended.restore()
    module(torch.ones(1))
    suspended.restore()
    assert "".join(said) == "bd" + "be" + "abce"


def test_hooks_that_are_gone_are_left_out() -> None:
    module = torch.nn.Linear(1, 1)
    removed, orphan = (module.register_forward_hook(lambda *_: None) for _ in range(2))
    removed.remove()
    other = torch.nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    SuspendedHooks([removed, orphan, other]).restore()
    assert list(module._forward_hooks) == [orphan.id]
