"""Every proof of this release, in forks of one process: `python -m tests.prove.every`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

from ds_patches.commands import prove
from ds_patches.core.symptom import plain
from ds_patches.proofs import ranks
from tests.prove.test_prove import HERE, is_claimed


def train(text: str) -> dict[str, prove.Run]:
    """As `prove` does, without an interpreter of its own."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "proof.py")
        script.write_text(text, encoding="utf-8")
        with contextlib.redirect_stdout(sys.__stdout__):
            ranks.main(script, list(prove.SIDES))
        return {side: prove._outcome(script, side) for side in prove.SIDES}


def main(names: list[str]) -> int:
    faults = 0
    for name in names or HERE:
        with contextlib.redirect_stdout(io.StringIO()) as said, mock.patch.object(
            prove, "_train", train
        ):  # fmt: skip
            status = prove.prove(name, None, script=False)
        found = [
            line for line in said.getvalue().splitlines() if line.startswith(("stock:", "patched:"))
        ]
        error = found[0].partition(":")[2].strip()
        good = not status and "stock is wrong" in said.getvalue() and is_claimed(HERE[name], error)
        faults += not good
        print("holds" if good else "FAILS", name, *found, sep="\t", flush=True)
        if not good:
            print(f"    {plain(HERE[name].outcome)}")
    return faults


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.exit(main(sys.argv[1:]))
