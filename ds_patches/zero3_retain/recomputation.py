"""Whether a module that runs in a backward is recomputed for the sake of hooks. Plain PyTorch."""

from __future__ import annotations

import sys

import torch
from torch.utils import checkpoint

from ds_patches.runtime import graph_task

#: From torch 2.8 on.
_SAYS_WHICH_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")


def is_for_hooks() -> bool:
    """Whether ``checkpoint(use_reentrant=False)`` recomputes what is running.

    To torch 2.7 nothing tells which hooks take what is saved, but the call that recomputes is in
    the stack.
    """
    if _SAYS_WHICH_HOOKS:
        return graph_task.saved_by_hooks()
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame, code = caller, caller.f_code
        if code.co_name == "unpack_hook" and code.co_filename == checkpoint.__file__:
            return True
    return False
