"""A DeepSpeed that cannot be imported is a state with a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.core import fake

ENGINE = "runtime/engine.py"
ALL_BROKEN = """
from ds_patches.core.state import State

before = ds_patches.status()
found = ds_patches.apply_all()
for call in (lambda: ds_patches.apply_all(strict=True), lambda: ds_patches.apply("sample")):
    with pytest.raises(ds_patches.PatchNotApplied, match=REASON) as refusal:
        call()
    assert {status.name for status in refusal.value.statuses} <= {"sample", "second"}
for seen in (*[before] * SEEN, found, ds_patches.status()):
    for name in ("sample", "second"):
        assert seen[name].state is State.BROKEN, seen[name]
        assert REASON in seen[name].reason, seen[name]
"""


@pytest.mark.parametrize(
    ("file", "old", "new", "seen", "reason"),
    [
        (ENGINE, "class Pipeline(Engine):", "class Pipe line:", True, "SyntaxError: "),
        ("__init__.py", "import engine", "import engine\n1 / 0", False, "ZeroDivision"),
        (ENGINE, "class Relied:", "import no\nclass Relied:", False, "No module named"),
    ],
)
def test_a_broken_deepspeed_says_so(
    tmp_path: Path, file: str, old: str, new: str, seen: bool, reason: str
) -> None:
    """seen: by the source, also without an import."""
    both = {"DS_PATCHES": "sample,second"}
    place = fake.Place(tmp_path, "sample", "second")
    path = place.deepspeed / "deepspeed" / file
    path.write_text(fake.edited(path.read_text(), old, new))
    done = place.run(f"SEEN, REASON = {seen}, {reason!r}\n{ALL_BROKEN}", **both)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert done.stderr.count(" are not applied, broken: the import of ") == len(lines) == 2
    done = place.command("doctor", **both)
    assert done.returncode == 2 * seen, "nobody can tell"
    found = re.search("^  broken, the import .*: sample, second$", done.stdout, re.MULTILINE)
    assert bool(found) == seen
