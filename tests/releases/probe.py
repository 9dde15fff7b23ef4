"""What the DeepSpeed that is first on the path lets each patch do: the gate's word, and the deed.

    python -m tests.releases.probe ANSWERS.json

A file, because DeepSpeed prints to standard output while it is imported.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import ds_patches
from ds_patches.core import gate, registry, release


def answers() -> dict[str, dict[str, str | bool]]:
    """The fields of `tests.releases.cell.Answer` for every patch, in plain types."""
    verdicts = {name: gate.check(patch) for name, patch in registry.patches().items()}
    with suppress(ds_patches.PatchNotApplied):  # the statuses say which, and why
        ds_patches.apply_all()
    return {
        name: {
            "state": verdicts[name].state.value,
            "reason": verdicts[name].reason,
            "live": status.live,
            "after": status.reason,
        }
        for name, status in ds_patches.status().items()
    }


def main() -> None:
    wanted, found = os.environ["DEEPSPEED_TEST_RELEASE"], release.installed()
    if found is None or found.text != wanted:
        sys.exit(f"DeepSpeed {wanted} was asked for, {found and found.text} is first on the path")
    Path(sys.argv[1]).write_text(json.dumps(answers()), encoding="utf-8")


if __name__ == "__main__":
    main()
