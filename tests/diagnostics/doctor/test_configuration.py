"""Configurations: of what a release gets wrong, what these settings can meet."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ds_patches.diagnostics import doctor, training
from ds_patches.diagnostics.configuration import Configuration
from ds_patches.diagnostics.defects import DEFECTS, DOCUMENTED, HARMS, SETTINGS, Defect, plain
from ds_patches.diagnostics.report import SOUND, WRONG
from tests import shell
from tests.diagnostics.doctor.asking import ask, cases, write

STEPS, ZERO = "gradient_accumulation_steps", "zero_optimization"
SHIPPED = dict(cases("shipped.txt"))
#: Conditions that a configuration decides, besides the table's settings.
OTHERS = ("filled", "single", "unclipped", "pipeline", "universal")


@pytest.mark.parametrize(("release", "case"), cases("settings.txt"))
def test_what_settings_meet(release: str, case: str, tmp_path: Path) -> None:
    write(tmp_path / "named.json", SHIPPED["axolotl 2"])
    expected, warned = ({*re.findall(f"^{mark} (.*)$", case, re.MULTILINE)} for mark in ">!")
    content = re.sub("^[>!] .*\n", "", case, flags=re.MULTILINE)
    answer = ask(write(tmp_path / "ds.conf.json", content), "--json", release=release)
    assert {*json.loads(answer.out)["warnings"]} == warned
    rows = [row for row in answer.findings if "script" not in row["depends"]]
    told = [row for row in rows if not row["section"].startswith("fix-")]
    depends = (f" [{' '.join(row['depends'])}]" * bool(row["depends"]) for row in told)
    assert {row["outcome"] + on for row, on in zip(told, depends, strict=True)} == expected
    assert answer.status == (bool(warned) or any(row["harm"] != "cost" for row in rows))


DECIDED = [one for one in DEFECTS if {*one.needs.split()} <= {*SETTINGS, *OTHERS}]


@pytest.mark.parametrize("one", DECIDED, ids=lambda one: f"{one.first} {one.outcome[:40]}")
def test_what_settings_decide_is_told(one: Defect) -> None:
    """With its evidence and what helps, under the title of its harm; a cost alone is no failure."""
    off = dict.fromkeys((*SETTINGS, *OTHERS), False)
    facts = off | dict.fromkeys(one.needs.split(), True) | {"stage": one.stages[-1]}
    case = training.Training(config=Configuration(facts), is_configured=True)
    report = doctor.diagnose(case, Version(one.first))
    text = " ".join(" ".join(report.lines()).split())
    before, _, block = text.partition(plain(one.outcome))
    assert HARMS[one.harm].upper() in before, text
    assert block.index("because: ") < block.index("do: "), text
    assert report.status == (SOUND if one.harm == "cost" else WRONG) or text.count("because: ") > 1


@pytest.mark.parametrize("release", ["0.16.9", "0.17.6", "0.18.4", "0.19.8"])
@pytest.mark.parametrize("name", SHIPPED)
def test_what_frameworks_ship_is_answered_on_a_screen(
    name: str, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is off is no alarm, what settings decide waits for no option, the worst comes first."""
    monkeypatch.chdir(tmp_path)  # a path's length decides how lines are wrapped
    file = write(Path("ds.json"), SHIPPED[name])
    answer = ask(file, release=release)
    assert answer.out.count("\n") <= 25, answer.out
    assert max(map(len, answer.out.splitlines())) <= 100
    found = ask(file, "--json", release=release).findings
    decided = [row for row in found if "script" not in row["depends"]]
    assert not [row for row in decided if row["outcome"] not in answer.text]
    assert [*decided] == sorted(decided, key=lambda row: [*HARMS].index(row["harm"]))
    autotp = [row for row in found if "autotp" in row["script"].lower()]
    assert bool(autotp) <= ("Examples AutoTP" in name), "a size of 1 is off"
    assert "WarmupLR" not in answer.out


def test_verbose_lists_what_depends_on_the_script(tmp_path: Path) -> None:
    file = write(tmp_path / "ds.json", {ZERO: {"stage": 2}})
    found = ask(file, "--json", release="0.18.4").findings
    short, long = (ask(file, *more, release="0.18.4").text for more in ((), ("-v",)))
    assert 0 < short.count(" -> ") < long.count(" -> ") == len(found)
    rest = len(found) - short.count(" -> ")
    assert f"{rest} more depend on what the script does: -v" in short


def test_every_need_is_a_setting(tmp_path: Path) -> None:
    facts = training.read([str(write(tmp_path / "ds.json", {ZERO: {}}))]).config.facts
    assert {name for one in DOCUMENTED for name in one.needs.split()} <= {*facts}
    assert training.Training().config.conditions(DOCUMENTED[0]) is not None


def test_a_pipe_and_the_older_option_are_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    file = write(tmp_path / "ds.json", {ZERO: {"stage": 2}, STEPS: 4})
    os.write(writing, file.read_bytes())
    os.close(writing)
    answers = [
        ask(*words, release="0.17.6")
        for words in ([f"/dev/fd/{reading}"], ["--config", file], [file])
    ]
    os.close(reading)
    assert {answer.status for answer in answers} == {1}
    assert len({answer.text.partition(":")[2] for answer in answers}) == 1


STAGE = '{"zero_optimization": {"stage": %s}, "train_batch_size": 1}'
BOTH = '{"train_batch_size": 8, "bf16": {"enabled": 1}, "fp16": {"enabled": 1}}'
#: What is no configuration, and what is said of it besides.
HOSTILE: dict[str, tuple[Any, str]] = {
    "half": ('{"a": 1', "neither JSON"),
    "no section": ('{"a": 1}', "no DeepSpeed configuration"),
    "misspelt": ('{"zero_optimisation": {}}', "did you mean 'zero_optimization'"),
    "no file": ('{"deepspeed": "none.json"}', "names 'none.json', which does not exist"),
    "FSDP": ("distributed_type: FSDP\nfsdp_config: {}\n", "its distributed_type is FSDP"),
    "a half stage": (STAGE % "2.5", "there is no ZeRO stage"),
    "both": (BOTH, "both on"),
    "infinite": (STAGE % "1e999", ""),
    "no stage": (STAGE % "7", "there is no ZeRO stage"),
    "deep": (STAGE % ("[" * 9_000), "neither JSON"),
    "long": ("a" * 10**8, "more than 65536 bytes"),
    "binary": (bytes(range(256)) * 100, "it is not text"),
    "empty": ("", "there is no word"),
    "a list": ("[1]", ""),
    "a text": ('"zero_optimization"', ""),
    "another name": ('{"deepspeed": "a\\u0000b"}', ""),
    **{
        f"{name} is {value}": ({ZERO: {}, name: value}, f"{name} is not a section")
        for name in (ZERO, "scheduler", "checkpoint", "optimizer")
        for value in ([1], "x", None)
    },
    **{f"steps are {value}": ({ZERO: {}, STEPS: value}, "a wrong type") for value in ([1], "x")},
}


@pytest.mark.parametrize("kind", [*HOSTILE, "folder", "device"])
def test_a_hostile_file_is_told_of(tmp_path: Path, kind: str) -> None:
    file, (content, why) = tmp_path / "ds.json", HOSTILE.get(kind, ("", ""))
    if not shell.is_made_odd(file, kind):
        write(file, content)
    answer = ask(file, release="0.18.4")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith("ds_patches: ")
    assert why in answer.err
    assert len(answer.err) < 1000


def test_aliases_are_not_written_out(tmp_path: Path) -> None:
    """As text, the setting would have 9 to the power of 9 words."""
    laughs = "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
    )
    text = f"{laughs}{ZERO}: {{stage: 2, overlap_comm: *a8}}\n"
    assert ask(write(tmp_path / "ds.yaml", text), release="0.18.4").status == 1


def test_yaml_is_not_read_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    answer = ask(write(tmp_path / "a.yaml", f"{ZERO}:\n  stage: 2"))
    assert "to read YAML: pip install pyyaml" in answer.err
