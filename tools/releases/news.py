"""Fixes of training that DeepSpeed's repository has and no release: what to read before the next.

A fix is told by the words of its message, so that features are listed, too. Which functions that
patches touch have changed, `doctor` says of a release.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

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
    log = git(*folder, "log", "--format=%x01%h%x00%as%x00%s%x00%b", f"{since}..HEAD", "--", *PATHS)
    numbers = Counter[str]()
    for entry in log.split("\1")[1:]:
        commit, day, subject, body = entry.split("\0")
        number = (re.findall(r"\(#(\d+)\)$", subject) or [""])[0]
        what = read.get(number, "NEW")
        if A_FIX.search(f"{subject} {body}"):
            say(f"{day} {commit} {what}: {subject}")
            numbers[what] += 1
    counts = "".join(f", {count} {what}" for what, count in sorted(numbers.items()))
    say(f"{numbers.total()} since {since}{counts}")
    return 0
