"""Every fix of training that DeepSpeed's releases after 0.16.0 brought, and whom its lack concerns.

ledger.json is the data: under "settings", for each name where it stands in the configuration, and
after "=" the values, a pattern; under "doings", what no configuration tells; under "raises", by a
number or the words of a fix, what `explain` knows it by: a Symptom's `shown`, and then its `asked`;
and the fixes, the oldest first. What symptoms.py has, as ordinary scripts meet it or no release
fixed it, is not written here again: a row there names upstream's numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ds_patches.core import files
from ds_patches.desk.row import Symptom


def fixes() -> list[Symptom]:
    """Return the lines as symptoms; none has a section in docs/troubleshooting.md."""
    return [_fix(**line) for line in read()["fixes"]]


def _fix(
    first: str, right: str, seen: str, numbers: str = "", stages: str = "0123", needs: str = "",
    by: str = "", do: str = "",
) -> Symptom:  # fmt: skip
    """Return a line as a symptom.

    first, right: the first release that is wrong, 0.16.0 if older ones are, too; the first right.
    seen: what a script sees, in Markdown.
    numbers: of upstream's pull requests or issues; none if it was found by comparing two releases.
    stages: the ZeRO stages, a digit each.
    needs: what brings it about: names of settings and doings.
    by: the patch that cures it. do: what helps besides another release.
    """
    named = (name for name in needs.split() if name != "script")
    words = ", ".join(read()["doings"].get(name, name.replace("_", " ")) for name in named)
    where = tuple(map(int, stages))
    return Symptom(words, seen, where, first, right, by, do, needs=needs, numbers=numbers)


def settings(config: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return what a configuration of DeepSpeed tells, but for its stage; "auto" is None."""
    found = {}
    for name, places in read()["settings"].items():
        each = [_is_on(config, *place.split("=", 1)) for place in places]
        found[name] = True if True in each else None if None in each else False
    return found


def _is_on(config: Any, place: str, pattern: str = r"(?!(none|false|0(\.0)?)$).+") -> bool | None:
    for name in place.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    # Of a YAML with aliases the text of a container may be longer than any memory.
    value = "..." if isinstance(config, (Mapping, list)) else str(config).lower()
    return None if value == "auto" else bool(re.fullmatch(pattern, value))


@cache
def read() -> Any:
    return json.loads(files.text(Path(__file__).with_suffix(".json")))
