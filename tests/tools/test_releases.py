"""The pages of releases, and the tools that write them."""

import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from ds_patches.core import registry, release
from tools.releases import RELEASES, measure, record
from tools.releases.news import news

PRINTED = """\
DeepSpeed 0.19.5 on 2 x H100, torch 2.11.0
          stock            patched
fp16      off by 0.96      off by 3.2e-05
muon      off by 0         off by 0         not shown
retained  RuntimeError     off by 0
"""
PAGE = """\
| proof | 0.18.4 | 0.19.5 |
| --- | --- | --- |
| fp16 | 1; 0 | - |
| gone | - | 1; 0 |
| on | a GPU; then | - |
"""


def test_a_patch_supports_releases_that_it_passed_on() -> None:
    """Whoever moves a range runs the releases again."""
    rows = record.read()
    for name, patch in registry.patches().items():
        for version in RELEASES:
            cell = rows[version, "2.13.0"].get(name, "-")
            is_covered = release.covers(patch.supported, Version(version))
            expected = "pass" if is_covered else "out of range"
            assert cell.startswith(expected), (name, version)


def test_a_column_is_written_among_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(measure, "PAGE", page)
    page.write_text(f"<!-- gpus -->\n\n{PAGE}\n<!-- end gpus -->\n")
    measure.write_column("0.19.5", PRINTED, "now")
    assert [line for line in page.read_text().splitlines() if line[:2] == "| "] == [
        "| proof | 0.18.4 | 0.19.5 |",
        "| --- | --- | --- |",
        "| fp16 | 1; 0 | 0.96; 3.2e-05 |",
        "| muon | - | **0; 0** |",
        "| retained | - | RuntimeError; 0 |",
        "| on | a GPU; then | 2 x H100, torch 2.11.0; now |",
    ]


def test_news_are_fixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """News begin at the tag of a known release."""
    assert news(tmp_path) == 1
    assert "no repository with a tag" in capsys.readouterr().out

    def git(*arguments: str) -> None:
        own = ("-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x")
        subprocess.run(["git", *own, *arguments], check=True, capture_output=True)

    def commit(subject: str, file: str, body: str = "") -> None:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(subject)
        git("add", ".")
        git("commit", "-m", subject, "-m", body)

    engine = "deepspeed/runtime/engine.py"
    git("init")
    commit("Fix what 0.19.7 has (#1)", engine)
    git("tag", "v0.19.7")
    git("tag", "v9.9.9")
    commit("Fix a lost gradient (#8463)", "deepspeed/runtime/zero/stage3.py")
    commit("Improve the engine (#2)", engine, body="It hung.")
    commit("Faster steps (#3)", engine)
    commit("Fix the launcher (#5)", "deepspeed/launcher/runner.py")
    commit("Fix with no number", "csrc/adam.cpp")
    assert news(tmp_path) == 0
    *printed, last = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 2)[2] for line in printed] == [
        "NEW: Fix with no number",
        "NEW: Improve the engine (#2)",
        "in the table: Fix a lost gradient (#8463)",
    ]
    assert last == "3 since v0.19.7, 2 NEW, 1 in the table"
