"""`ds-patches`: what it says, and when it fails."""

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
    for words in ("ready", "every shape is known", "0.19.8", "https://example.org/1"):
        assert words in alone
    place.path = [fake.dependencies(place.root / "lib")]
    sample = json.loads(place.command("status", "--json", bare=True).stdout)["sample"]
    expected = {"state": "not installed", "installed": None, "live": False}
    expected["upstream"] = [{"label": "#1", "url": "https://example.org/1"}]
    assert sample.items() >= expected.items()
    alone = place.command("status", "sample", "--json", bare=True).stdout
    assert json.loads(alone) == {"sample": sample}


def test_doctor_fails_on_drift_and_lists_all_of_it(place: fake.Place) -> None:
    sound = place.command("doctor", DS_PATCHES="sample", DS_PATCHES_STRICT="0").stdout
    assert ", DS_PATCHES_STRICT 0" in sound
    assert "  disabled (DS_PATCHES=sample): accumulation" in sound
    engine = fake.edited(fake.ENGINE, "self.factor, x)", "x)")
    engine = fake.edited(engine, "limit = 3", "limit = 4")
    fake.deepspeed(place.deepspeed, engine=engine)
    printed = place.command("doctor", "-v", status=1, DS_PATCHES="sample").stdout
    assert re.search(" refused, deepspeed.runtime.engine:.*: sample ", " ".join(printed.split()))
    drift = printed.partition("\ndrift\n")[2]
    for qualname in ("Engine.forward", "Relied"):
        assert f"deepspeed.runtime.engine:{qualname} has the unknown shape" in drift
    forced = place.command("doctor", status=None, DS_PATCHES_FORCE="sample").stdout
    assert "  would apply: sample\n" in forced


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (("status",), {"DS_PATCHES_SAMPLE": "0"}, "DS_PATCHES_SKIP=sample"),
        (("statsu",), {}, "did you mean 'status'?"),
        (("status", "smaple"), {}, "did you mean 'sample'?"),
        (("status", "--jsno"), {}, "unrecognized arguments: --jsno"),
    ],
)
def test_a_word_that_means_nothing_is_an_error(
    place: fake.Place, words: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    done = place.command(*words, status=2, **variables)
    assert (done.stdout, message in done.stderr) == ("", True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ds_patches.names())
def test_every_patch_is_whole(name: str) -> None:
    patch = registry.patch(name)
    assert patch.name == name
    assert set(patch.requires) <= {n for n, p in registry.patches().items() if not p.requires}
    page = import_module(patch.hooks.removesuffix(".hooks"))
    assert page.is_applied() is ds_patches.is_applied(name)
    assert all((patch.summary, patch.remove_when))
    assert all(patch.function(target.wrapper).__doc__ for target in patch.targets)
