"""Running `ds-patches` in this process, and the cases that stand in texts."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from ds_patches.__main__ import main


class Answer(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """What is printed, on one line."""
        return " ".join(self.out.split())

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Of JSON."""
        return list(json.loads(self.out)["findings"])


def run(*words: object) -> Answer:
    """Run a command of ds-patches in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = main([*map(str, words)])
    return Answer(status, out.getvalue(), err.getvalue())


def ask(*words: object, release: str = "") -> Answer:
    """Run doctor."""
    return run("doctor", *words, *(["--release", release] if release else []))


def write(path: Path, content: Any) -> Path:
    """Write bytes, a text, or JSON."""
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def cases(name: str) -> list[tuple[str, str]]:
    """The cases of a text beside this file, each with the words of the line that it begins with."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return re.findall(r"^=== (.*)\n((?:(?!=== ).*\n)*)", text, re.MULTILINE)
