"""The trial of `doctor --train-check` with an engine that loses its gradients, patched or not.

    python -m tests.traincheck.losing_trial WHERE [--patched] [--compiled] RESULT

WHERE: "everywhere" or "stock"; with "compiled", also take DeepCompile to be there.
"""

from __future__ import annotations

import sys
from typing import Any

from ds_patches.traincheck import trial
from tests.traincheck import checked

where, *arguments = sys.argv[1:]
step = trial._step


def losing_step(engine: Any, device: Any) -> None:
    if where == "everywhere" or (where == "stock" and "--patched" not in arguments):
        checked.lose(engine)
    step(engine, device)


trial._step = losing_step
if where == "compiled":
    config = trial._config
    trial._deepcompile = lambda: ""
    trial._config = lambda compiled: config(False)  # then engine.compile() is torch.compile
sys.exit(trial.main(arguments))
