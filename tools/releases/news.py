"""Fixes of training that DeepSpeed's repository has and no release: what to read before the next.

A fix is told by the words of its message, so that features are listed, too. What changes a function
that patches touch is listed whatever it says.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from ds_patches.core import definitions, gate, registry, release
from ds_patches.diagnostics.defects import DEFECTS
from tests.docs.test_defects import COMMITS
from tools.releases import RELEASES, git, say

#: What trains: the package without these folders, and its kernels.
OTHERS = "autotuning inference launcher model_implementations"
PATHS = ("deepspeed", "csrc", *(f":!deepspeed/{folder}" for folder in OTHERS.split()))
A_FIX = re.compile(
    r"\w*fix|\b(bug|crash|deadlock|dropp|error|fail|hang|hung|ignor|incorrect|leak|lost|mismatch|miss"
    r"|nan\b|overflow|race|silent|stale|wrong)",
    re.IGNORECASE,
)
#: By module and name there, the patches that touch it in the newest release.
Touched = dict[str, dict[str, list[str]]]


def news(checkout: Path) -> int:
    """Print the commits since the newest release that is tagged there; 1 if none is.

    checkout: of DeepSpeed's repository, or the repository itself.
    """
    folder = ("-C", str(checkout.resolve()))
    tags = git(*folder, "tag").split()
    since = next((f"v{version}" for version in reversed(RELEASES) if f"v{version}" in tags), None)
    if since is None:
        say(f"{checkout}: no repository with a tag of DeepSpeed {RELEASES[0]} or later")
        return 1
    named = {number for defect in DEFECTS for number in defect.numbers.split()}
    read = {number: f"read: {what}" for _, number, what in COMMITS}
    read |= dict.fromkeys(named, "in the table")
    touched = _touched()
    log = git(
        *folder, "log", "--name-only", "--format=%x01%h%x00%as%x00%s%x00%b%x00",
        f"{since}..HEAD", "--", *PATHS,
    )  # fmt: skip
    numbers, changing = Counter[str](), 0
    for entry in log.split("\1")[1:]:
        commit, day, subject, body, files = entry.split("\0")
        number = (re.findall(r"\(#(\d+)\)$", subject) or [""])[0]
        what = read.get(number, "NEW")
        changed = ", ".join(sorted(_changed(folder, commit, files.split(), touched)))
        if not changed and not A_FIX.search(f"{subject} {body}"):
            continue
        say(f"{day} {commit} {what}: {subject}{changed and f' | changes {changed}'}")
        numbers[what] += 1
        changing += bool(changed)
    counts = "".join(f", {count} {what}" for what, count in sorted(numbers.items()))
    say(f"{numbers.total()} since {since}{counts}; {changing} change what patches touch")
    return 0


def _touched() -> Touched:
    newest = Version(RELEASES[-1])
    touched: Touched = {}
    for name, patch in registry.patches().items():
        if release.covers(patch.supported, newest):
            for place in gate.places(patch, newest):
                touched.setdefault(place.module, {}).setdefault(place.qualname, []).append(name)
    return touched


def _changed(folder: tuple[str, ...], commit: str, files: list[str], of: Touched) -> Iterator[str]:
    """Yield the functions whose shape a commit changes, with their patches."""
    for file in files:
        places = of.get(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."), {})
        before, after = (
            ast.parse(git(*folder, "show", f"{revision}:{file}")).body if places else []
            for revision in (f"{commit}^", commit)
        )
        for qualname, patches in places.items():
            if _digest(before, qualname) != _digest(after, qualname):
                yield f"{qualname} ({', '.join(patches)})"


def _digest(scope: list[ast.stmt], qualname: str) -> str | None:
    node = definitions.by_name(scope, qualname)
    return node and definitions.digest(node)
