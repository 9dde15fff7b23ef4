"""`ds-patches`: what it prints, and when it fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

import ds_patches
from ds_patches import __main__ as command_line
from ds_patches.core import registry, values
from ds_patches.core.patch import ALL
from tests.core import fake


def test_status_is_one_line_per_patch(place: fake.Place) -> None:
    done = place.command("status")
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert [*found] == sorted([*ds_patches.names(), "sample"])
    assert found["sample"].split(maxsplit=2)[1:] == ["ready", "not applied in this process"]


SAMPLE = """\
sample: Marks what the fake engine returns
  state      ready
  why        not applied in this process; DeepSpeed 0.19.8 is in >=0.16.0,<=0.19.8, every shape is known
  DeepSpeed  0.19.8
  option     mode=soft (default)
  upstream   #1, https://example.org/1
"""  # noqa: E501


def test_status_of_one_patch_says_all(place: fake.Place) -> None:
    assert place.command("status", "sample").stdout == SAMPLE
    paragraphs = place.command("status", "-v").stdout.split("\n\n")
    assert SAMPLE.strip() in [paragraph.strip() for paragraph in paragraphs]
    assert [p.partition(":")[0] for p in paragraphs] == sorted([*ds_patches.names(), "sample"])


def test_status_of_a_live_patch_names_targets_and_notes(place: fake.Place) -> None:
    code = """
from ds_patches.commands import status
print(status.in_full(ds_patches.apply("sample", mode="hard")))
"""
    assert {
        "  state      applied",
        "  option     mode=hard",
        "  target     deepspeed.runtime.engine:Engine.forward is on top",
        "  note       engines built before keep their hooks",
    } <= {*place.output(code).splitlines()}


def test_status_as_json_where_deepspeed_is_not_installed(place: fake.Place) -> None:
    place.path = [fake.dependencies(place.root / "lib")]
    done = place.command("status", "--json", bare=True)
    assert done.returncode == 0, done.stderr
    sample = json.loads(done.stdout)["sample"]
    assert sample["state"] == "not installed"
    assert sample["installed"] is None
    assert sample["live"] is False
    assert sample["options"] == {"mode": "soft"}
    assert sample["upstream"] == [{"label": "#1", "url": "https://example.org/1"}]
    one = place.command("status", "sample", "--json", bare=True)
    assert json.loads(one.stdout) == {"sample": sample}


def test_doctor_shows_the_environment_and_what_would_apply(place: fake.Place) -> None:
    done = place.command("doctor", DS_PATCHES="sample", DS_PATCHES_SAMPLE_MODE="hard")
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    for part in (["deepspeed", "0.19.8"], ["sample", "would apply"]):
        assert part in lines
    assert ["DS_PATCHES_SAMPLE_MODE", "hard"] in lines
    wrong = done.stdout.partition("what DeepSpeed 0.19.8 gets wrong\n")[2]
    assert "  not cured: accumulation is disabled (DS_PATCHES=sample), if the script" in wrong


def test_doctor_fails_on_drift_and_lists_all_of_it(place: fake.Place) -> None:
    engine = fake.edited(fake.ENGINE, "self.factor, x)", "x)")
    engine = fake.edited(engine, "limit = 3", "limit = 4")
    fake.deepspeed(place.deepspeed, engine=engine)
    done = place.command("doctor", "-v", DS_PATCHES="sample")
    assert done.returncode == 1
    assert re.search("sample +shape changed, deepspeed.runtime.engine:", done.stdout)
    (section,) = re.findall("^drift\n((?:  .+\n)+)", done.stdout, re.MULTILINE)
    for qualname in ("Engine.forward", "Relied"):
        assert f"  deepspeed.runtime.engine:{qualname}\n" in section
    forced = place.command("doctor", DS_PATCHES_FORCE="sample")
    assert re.search("sample +would apply", forced.stdout)
    assert "drift" not in forced.stdout, "which is asked for by -v"


UNKNOWN = "no command is 'statsu' (did you mean 'status'?); the commands are: explain,"


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (("status",), {"DS_PATCHES_SAMPEL": "1"}, "DS_PATCHES_SAMPLE"),
        (("statsu",), {}, UNKNOWN),
        (("status", "smaple"), {}, "status: no patch is named 'smaple' (did you mean 'sample'?)"),
        (("status", "--jsno"), {}, "--jsno means nothing (did you mean '--json'?)"),
    ],
)
def test_a_word_that_means_nothing_is_an_error(
    place: fake.Place, words: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    done = place.command(*words, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_script_is_the_module() -> None:
    pyproject = (fake.REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    (reference,) = re.findall(
        r'^\[project\.scripts\]\nds-patches = "(.+)"$', pyproject, re.MULTILINE
    )
    assert resolve_name(reference) is command_line.main


def test_the_bare_command_is_help_in_a_users_order() -> None:
    done = fake.run("", arguments=("-m", "ds_patches"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ds-patches ")
    examples = done.stdout.partition("\nexamples:\n")[2].partition("\n\n")[0].splitlines()
    assert [example.split()[1] for example in examples] == ["explain", "doctor", "run"]
    listed = re.findall(r"^    ([a-z-]+) ", done.stdout, re.MULTILINE)
    assert listed == ["explain", "doctor", "run", "status", "enable", "disable", "env"]
    (apart,) = re.findall("^for maintainers: (.+)$", done.stdout, re.MULTILINE)
    assert [*listed, *apart.split(", ")] == [*command_line._COMMANDS]
    assert Path(done.stdout.splitlines()[-1].partition(": ")[2]).is_file()


def test_the_version_is_printed(place: fake.Place) -> None:
    assert place.command("--version").stdout == f"ds-patches {ds_patches.__version__}\n"


def test_every_folder_is_a_patch() -> None:
    folders = sorted(p.parent.name for p in fake.REPOSITORY.glob("ds_patches/*/binding.py"))
    assert folders == list(registry.patches())


@pytest.mark.parametrize("name", ds_patches.names())
def test_every_patch_says_all_there_is_to_say(name: str) -> None:
    patch = registry.patch(name)
    for text in (patch.summary, patch.why, patch.how, patch.remove_when):
        assert text.strip()
        assert "|" not in patch.summary + patch.remove_when, "a cell of the table"
    assert patch.upstream
    assert all(link.url.startswith("https://") for link in patch.upstream)
    assert all(one.why.strip() for one in patch.dependencies)
    for option in patch.options:
        assert all(re.fullmatch(r"\w+", choice) for choice in option.choices), "no list of them"
        assert ALL not in option.choices
    several = [option for option in patch.options if option.several]
    assert len(several) <= 1
    for option in several:
        assert not {word.lower() for word in option.words} & {*values.YES, *values.NO}
