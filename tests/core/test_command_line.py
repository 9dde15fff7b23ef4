"""`python -m ds_patches`: status, doctor, table; and that the README's table is that table."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import ds_patches
from ds_patches.core import flags, registry, report
from ds_patches.core.patch import ALL
from tests.core import fake


def command(
    tmp_path: Path, *arguments: str, deepspeed: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line with only the sample patch added, in a bare interpreter."""
    path = fake.dependencies(tmp_path / "lib")
    add = fake.with_patches(fake.patch_folder(tmp_path / "patches"))
    code = add + f"from ds_patches.__main__ import main; raise SystemExit(main({arguments!r}))"
    others = (deepspeed,) if deepspeed else ()
    return fake.run(code, path, *others, bare=True, **variables)


def test_status_is_one_line_per_patch(tmp_path: Path) -> None:
    done = command(tmp_path, "status", deepspeed=fake.deepspeed(tmp_path / "ds"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == sorted([*ds_patches.names(), "sample"])
    (line,) = (line for line in lines if line.startswith("sample"))
    for part in ("ready", "0.19.8", "not applied in this process", "https://example.org/1"):
        assert part in line
    assert "\033" not in done.stdout, "no colour into a pipe"


def test_status_says_what_was_chosen(tmp_path: Path) -> None:
    done = command(tmp_path, "status", DS_PATCHES_SAMPLE_MODE="hard")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("sample"))
    assert "  mode=hard  " in line
    assert done.stdout.count("=hard") == 1
    assert "mode=" not in command_again(tmp_path, "status").stdout


def test_status_as_json(tmp_path: Path) -> None:
    done = command(tmp_path, "status", "--json")
    assert done.returncode == 0, done.stderr
    sample = json.loads(done.stdout)["sample"]
    assert sample["state"] == "not installed"
    assert sample["installed"] is None
    assert sample["live"] is False
    assert sample["options"] == {"mode": "soft"}
    assert sample["upstream"] == [{"label": "#1", "url": "https://example.org/1"}]


def test_doctor_shows_the_environment_and_what_would_apply(tmp_path: Path) -> None:
    only = {"DS_PATCHES": "sample", "DS_PATCHES_SAMPLE_MODE": "hard"}
    done = command(tmp_path, "doctor", deepspeed=fake.deepspeed(tmp_path / "ds"), **only)
    assert done.returncode == 0, done.stderr + done.stdout
    for part in ("python", "platform", "torch", "wrapt", "sample: would apply"):
        assert part in done.stdout
    assert "DS_PATCHES_SAMPLE_MODE  hard" in done.stdout
    assert "deepspeed               0.19.8" in done.stdout


def test_doctor_fails_on_drift_and_lists_all_of_it(tmp_path: Path) -> None:
    engine = fake.edited(fake.ENGINE, "self.factor, x)", "x)")
    engine = fake.edited(engine, "limit = 3", "limit = 4")
    installation = fake.deepspeed(tmp_path / "ds", engine=engine)
    done = command(tmp_path, "doctor", deepspeed=installation, DS_PATCHES="sample")
    assert done.returncode == 1
    assert "sample: would not apply, shape changed" in done.stdout
    for qualname in ("Engine.forward", "Relied"):
        assert f"drift: deepspeed.runtime.engine:{qualname}" in done.stdout
    (section,) = (s for s in re.split(r"\n  (?=\S)", done.stdout) if s.startswith("sample"))
    assert section.count("found ") == section.count("0.16.0-0.19.8") == 2
    forced = command_again(tmp_path, "doctor", installation, DS_PATCHES_FORCE="sample")
    assert "sample: would apply" in forced.stdout


def command_again(
    tmp_path: Path, name: str, deepspeed: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    again = tmp_path / "again"
    again.mkdir()
    return command(again, name, deepspeed=deepspeed, **variables)


def test_a_meaningless_variable_is_an_error(tmp_path: Path) -> None:
    done = command(tmp_path, "status", DS_PATCHES_SAMPEL="1")
    assert done.returncode == 2
    assert "DS_PATCHES_SAMPLE" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_module_runs() -> None:
    done = fake.run("", arguments=("-m", "ds_patches", "table"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == report.table()


def test_the_table_has_every_folder_and_the_readme_has_the_table() -> None:
    rows = report.table().splitlines()[2:]
    folders = sorted(p.parent.name for p in fake.REPOSITORY.glob("ds_patches/*/binding.py"))
    assert [row.split("`")[1] for row in rows] == folders == list(registry.patches())
    readme = (fake.REPOSITORY / "README.md").read_text(encoding="utf-8")
    _, _, rest = readme.partition("<!-- patches:begin -->")
    embedded, end, _ = rest.partition("<!-- patches:end -->")
    assert end, "README.md has the markers"
    assert embedded.strip() == report.table(), "python -m ds_patches table"


@pytest.mark.parametrize("name", ds_patches.names())
def test_every_patch_says_all_there_is_to_say(name: str) -> None:
    patch = registry.patch(name)
    for text in (patch.summary, patch.why, patch.how, patch.remove_when):
        assert text.strip()
        assert "|" not in patch.summary + patch.remove_when, "a cell of the table"
    assert patch.upstream
    assert all(link.url.startswith("https://") for link in patch.upstream)
    assert all(fact.why.strip() for fact in patch.facts)
    for option in patch.options:
        assert flags._chosen(option, option.default), "the default is a choice"
        assert all(re.fullmatch(r"\w+", choice) for choice in option.choices), "no list of them"
        assert ALL not in option.choices
    first = [option for option in patch.options if option.first]
    assert len(first) <= 1
    for option in first:
        assert not {word.lower() for word in option.words} & {*flags._YES, *flags._NO}
