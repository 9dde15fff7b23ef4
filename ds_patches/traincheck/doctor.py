"""`doctor --train-check`: does a small model train here, stock and with what would be applied?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_patches.core import flags
from ds_patches.doctor import trials

_TRIAL = ("ds_patches.traincheck.trial",)
#: In the place of a launcher's: the trial is one process.
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


class Diagnosis:
    """The lines to print, as they come, and whether all trains with what would be applied."""

    def __init__(self, environment: Mapping[str, str], seconds: float) -> None:
        self._environment = {**environment, **_ALONE}
        self._seconds = seconds
        self.trains = True

    def lines(self) -> Iterator[str]:
        stock = self._trial()
        yield f"train check: 4 parameters, ZeRO-3, one process on {stock.get('device', '?')}"
        yield f"  eager, stock: {_said(stock)}"
        yield self._patched("eager")
        why_not = stock.get("deepcompile", "the first trial said nothing of it")
        if not why_not:
            compiled = self._trial("--compiled")
            why_not = compiled.get("deepcompile")
        if why_not:
            yield f"  DeepCompile: not checked, {why_not}; the lines above are of eager ZeRO-3"
            return
        yield f"  DeepCompile, stock: {_said(compiled)}"
        yield self._patched("DeepCompile", "--compiled")

    def _patched(self, name: str, *options: str) -> str:
        found = self._trial("--patched", *options)
        self.trains &= not found["error"] and not found["untrained"]
        return f"  {name}, {', '.join(found['live']) or 'no patch'} live: {_said(found)}"

    def _trial(self, *options: str) -> dict[str, Any]:
        """Run one and return what it wrote, or why it wrote nothing."""
        environment = self._environment
        if "--patched" not in options:
            environment = {k: v for k, v in environment.items() if not flags.is_ours(k)}
        found = trials.run([*_TRIAL, *options], environment, self._seconds)
        return {"live": [], "untrained": [], **found}


def _said(found: dict[str, Any]) -> str:
    if found["error"]:
        return f"did not run: {found['error']}"
    if found["untrained"]:
        return f"NOT TRAINED: {', '.join(found['untrained'])}"
    return "all train"
