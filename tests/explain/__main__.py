"""`python -m tests.explain RELEASE SCRIPT`: writes what the script prints on two ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.explain import SAID
from tests.releases.run import environment

_FOLDERS = re.compile(r'File "[^"]*?/(?:site-packages|\.releases/[\d.]+|lib/python3\.\d+)/')


def said(release: str, script: str) -> str:
    """What the ranks print there, without the folders of this machine."""
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *words, "-m", "tests.explain.crashes", script],
        env=environment(release) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode, done.stdout
    text = _FOLDERS.sub('File "/env/', done.stderr).replace(f"{Path.cwd()}/", "/home/user/")
    return "\n".join([*(line for line in text.splitlines() if line.startswith("[rank")), ""])


if __name__ == "__main__":
    release, script = sys.argv[1:]
    (SAID / f"{release}-{script}.txt").write_text(said(release, script), encoding="utf-8")
