"""All that `explain` knows: what is wrong where, what later releases fixed, and notes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ds_patches.desk import ledger
from ds_patches.desk.row import Symptom, plain
from ds_patches.desk.symptoms import COMPILED, SYMPTOMS


def _note(script: str, outcome: str, anchor: str, do: str, **more: Any) -> Symptom:
    """What is no defect of some releases has no stages."""
    return Symptom(script, outcome, (), "0", None, "", add=do, anchor=anchor, **more)


# fmt: off
_NOTES = (
    _note("a parameter is read that is not gathered", "`'weight' must be 2-D`", "not-gathered",
          "at ZeRO-3, call the model that the engine returns, or read the parameter inside "
          "`with deepspeed.zero.GatheredParameters(...)`",
          asked=("`mat2 must be a matrix, got 1-D tensor`",
                 "`out of bounds for storage of size 0`", "setStorage out bounds"),
          shown="deepspeed|must be 2-D|1-D tensor"),
    _note("DeepCompile: up to 0.18.9 on a newer torch; from 0.19.4 on, layers of different shapes",
          "`Guard failed on the same frame it was created`", "guard-failed",
          "up to 0.18.9 upgrade DeepSpeed; from 0.19.4 on apply dc_fallback", shown=COMPILED),
    _note("PyTorch's own message, and right: the first backward has freed the graph",
          "`Trying to backward through the graph a second time`", "second-time",
          "give `retain_graph=True` to every backward over a graph but the last"),
    _note("DeepSpeed builds an operator in the first run, for a minute or more, or waits for the "
          "lock of a build that was killed",
          "nothing happens from the start on", "hangs-at-the-start",
          "if it takes longer, and no other run is building, remove the file `lock` under "
          "~/.cache/torch_extensions or $TORCH_EXTENSIONS_DIR",
          asked=("`as PyTorch extensions root`", "`KeyboardInterrupt`", "`file_baton.py`",
                 "hang outset", "hang torch_extensions"),
          shown=r"!file_baton\.py|extensions root[.…]*\s*\Z"),
    _note("patches that are not applied where they should be",
          "no message, and nothing is applied", "nothing-applied",
          "run `ds-patches doctor` in the place of your command: it looks for the start-up hook",
          asked=("nothing applied", "patches not applied")),
)
# fmt: on


def _fixes() -> Iterator[Symptom]:
    """Yield what later releases fixed, with what it raised."""
    told = ledger.read()["raises"]
    for row in ledger.fixes():
        keys = (*row.numbers.split(), row.outcome)
        shown, *raises = next((told[key] for key in keys if key in told), [""])
        yield replace(
            row,
            script=row.script or "any script",
            outcome=plain(row.outcome),
            anchor=name(row),
            asked=tuple(raises),
            shown=shown,
        )


def name(fix: Symptom) -> str:
    """Return the name of a fix, as a link has it: by its number, or by its first words."""
    words = re.findall(r"\w+", fix.outcome.lower())
    return f"fix-{'-'.join(fix.numbers.split() or words[:6])}"


KNOWN = (*SYMPTOMS, *_NOTES, *_fixes())
