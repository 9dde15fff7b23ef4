"""A DeepSpeed that cannot be imported is a state with a reason."""

import re

import pytest

from tests.core import fake

ENGINE = "runtime/engine.py"
ALL_BROKEN = """
from ds_patches.core.state import State

before = ds_patches.status()
found = ds_patches.apply_all()
for call in (lambda: ds_patches.apply_all(strict=True), lambda: ds_patches.apply("lower")):
    with pytest.raises(ds_patches.PatchNotApplied, match=REASON) as refusal:
        call()
    assert {status.name for status in refusal.value.statuses} <= {"lower", "upper"}
for seen in (*[before] * SEEN, found, ds_patches.status()):
    for name in ("lower", "upper"):
        assert seen[name].state is State.REFUSED, seen[name]
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
    two: fake.Place, file: str, old: str, new: str, seen: bool, reason: str
) -> None:
    """seen: by the source, also without an import."""
    both = {"DS_PATCHES": "lower,upper"}
    fake.edit(two.deepspeed / "deepspeed" / file, old, new)
    warned = two.run(f"SEEN, REASON = {seen}, {reason!r}\n{ALL_BROKEN}", **both).stderr
    assert warned.count(" are not applied, refused: the import of ") == warned.count("\n") == 2
    # Without an import nobody can tell.
    printed = " ".join(two.command("doctor", status=2 * seen, **both).stdout.split())
    assert bool(re.search(" refused, the import .*: lower, upper ", printed)) == seen
