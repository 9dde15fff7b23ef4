"""`ds-patches`: what it says, and when it fails."""

from __future__ import annotations

import json
import re
from importlib import import_module

import pytest

import ds_patches
from ds_patches.core import registry
from tests.core import fake


def test_status(place: fake.Place) -> None:
    """A line for each patch, or all that is to say; as JSON also where DeepSpeed is missing."""
    names = sorted([*ds_patches.names(), "sample"])
    lines = place.command("status").stdout.splitlines()
    assert [line.split()[0] for line in lines] == names
    assert any(line.split()[:2] == ["sample", "ready"] for line in lines)
    alone = place.command("status", "sample").stdout
    assert alone.strip() in place.command("status", "-v").stdout
    for said in ("ready", "every shape is known", "0.19.8", "https://example.org/1"):
        assert said in alone
    place.path = [fake.dependencies(place.root / "lib")]
    sample = json.loads(place.command("status", "--json", bare=True).stdout)["sample"]
    found = [sample[key] for key in ("state", "installed", "live", "upstream")]
    upstream = {"label": "#1", "url": "https://example.org/1"}
    assert found == ["not installed", None, False, [upstream]]
    one = place.command("status", "sample", "--json", bare=True)
    assert json.loads(one.stdout) == {"sample": sample}


def test_doctor_fails_on_drift_and_lists_all_of_it(place: fake.Place) -> None:
    sound = place.command("doctor", DS_PATCHES="sample", DS_PATCHES_STRICT="0")
    assert sound.returncode == 0, sound.stderr + sound.stdout
    assert ", DS_PATCHES_STRICT 0" in sound.stdout
    assert "not cured: accumulation is disabled (DS_PATCHES=sample)" in sound.stdout
    engine = fake.edited(fake.ENGINE, "self.factor, x)", "x)")
    engine = fake.edited(engine, "limit = 3", "limit = 4")
    fake.deepspeed(place.deepspeed, engine=engine)
    done = place.command("doctor", "-v", DS_PATCHES="sample")
    assert done.returncode == 1
    assert re.search("  shape changed, deepspeed.runtime.engine:.*: sample\n", done.stdout)
    drift = done.stdout.partition("\ndrift\n")[2]
    for qualname in ("Engine.forward", "Relied"):
        assert f"deepspeed.runtime.engine:{qualname} has the unknown shape" in drift
    forced = place.command("doctor", DS_PATCHES_FORCE="sample")
    assert "  would apply: sample\n" in forced.stdout


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (("status",), {"DS_PATCHES_SAMPLE": "0"}, "DS_PATCHES_SKIP=sample"),
        (("statsu",), {}, "invalid choice: 'statsu'"),
        (("status", "smaple"), {}, "did you mean 'sample'?"),
        (("status", "--jsno"), {}, "unrecognized arguments: --jsno"),
    ],
)
def test_a_word_that_means_nothing_is_an_error(
    place: fake.Place, words: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    done = place.command(*words, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ds_patches.names())
def test_every_patch_is_whole(name: str) -> None:
    patch = registry.patch(name)
    assert patch.name == name
    assert set(patch.requires) <= {n for n, one in registry.patches().items() if not one.requires}
    page = import_module(patch.hooks or f"ds_patches.{name}")
    assert {"Use", "Cost", "Why", "How"} <= {*str(page.__doc__).splitlines()}
    assert page.is_applied() is ds_patches.is_applied(name)
    assert all((patch.summary, patch.remove_when))
    begins = [str(patch.hook(one.wrapper).__doc__).split()[0] for one in patch.targets]
    assert not {"None", "It", "Of", "That", "Those"} & {*begins}, begins
    assert patch.upstream or "No issue was found." in str(page.__doc__)
