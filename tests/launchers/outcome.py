"""What a launch must have come to."""

from __future__ import annotations

import re

import torch

from tests.launchers.launch import Run
from tests.launchers.user import model

RANKS = 2
CRASH = "The size of tensor a (0) must match the size of tensor b"
#: Of rank 0, with a launcher's prefix or without.
_LIVE = re.compile(rf"ds_patches: .*zero3_retain.* live on all {RANKS} ranks of this engine$", re.M)


def assert_patched(*runs: Run) -> None:
    """Every rank came to its end with the patch live and PyTorch's gradients; rank 0 says so.

    runs: of one job, one for each host that it was launched on.
    """
    text = "\n".join(map(str, runs))
    assert not any(run.code for run in runs), text
    assert len(_LIVE.findall("\n".join(run.output for run in runs))) == 1, text
    reports = runs[0].reports
    assert [(report["rank"], report["world"]) for report in reports] == [(0, 2), (1, 2)], text
    expected = gradients()
    for report in reports:
        assert "zero3_retain" in report["live"], text
        assert report["gradients"].keys() == expected.keys()
        for name, found in report["gradients"].items():
            torch.testing.assert_close(torch.tensor(found), expected[name], msg=f"{name}\n{text}")


def assert_stock(run: Run) -> None:
    """Stock crashed, and nobody said a word of ds_patches: a single patched rank would have."""
    assert run.code, run
    assert CRASH in run.output, run
    assert "ds_patches: " not in run.output, run
    assert not run.reports, run


def gradients() -> dict[str, torch.Tensor]:
    """Of the same losses in plain PyTorch, averaged over the ranks' batches."""
    network = model.build()
    for rank in range(RANKS):
        tokens = model.batch(rank)
        (sum(model.losses(network(tokens), tokens)) / RANKS).backward()
    return {name: param.grad for name, param in network.named_parameters()}
