"""`doctor --streams`: do streams change what is trained here?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_patches.doctor import trials

_TRIAL = ("ds_patches.streamcheck.trial",)


class Diagnosis:
    """The lines to print, and whether all runs are equal, or there is nothing to check."""

    def __init__(self, environment: Mapping[str, str], seconds: float) -> None:
        self._environment = environment
        self._seconds = seconds
        self.equal = True

    def lines(self) -> Iterator[str]:
        found = trials.run(_TRIAL, self._environment, self._seconds)
        self.equal = not found["error"] and not found.get("unsteady") and not found.get("first")
        if found.get("not_checked") and self.equal:
            yield f"streams: not checked, {found['not_checked']}"
            return
        yield f"streams: {found.get('places', '?')}, torch {found.get('torch', '?')}"
        if found.get("unsteady"):
            yield f"  NOT EQUAL already without streams, in two runs: {found['unsteady']}"
        elif found.get("runs"):
            yield f"  {_counted(found)}"
            if found["first"]:
                yield f"  the first difference is in {found['first']}"
        if found["error"]:
            yield f"  did not run to its end: {found['error']}"


def _counted(found: dict[str, Any]) -> str:
    many = f"{found['equal']} of {found['runs']} runs" + " so far" * (found["runs"] < found["of"])
    if found["equal"] == found["runs"]:
        return f"equal to the bit with a stream per stage and without: {many}"
    return f"NOT EQUAL to the bit with a stream per stage and without: only {many}"
