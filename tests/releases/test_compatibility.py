"""What docs/compatibility.json has covers what is claimed; what a cell says, and what is run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version as version_of
from pathlib import Path

import pytest
from packaging.version import Version

from ds_patches.core import registry, release
from ds_patches.core.state import State
from tests import releases
from tests.core import fake
from tests.releases import columns, matrix, page, record, support
from tests.releases.columns import CORE
from tests.releases.matrix import Answer, judge
from tests.releases.record import Cell, Record, Records
from tests.releases.run import Outcome, count
from tests.releases.run import pytest as run_pytest
from tests.releases.test_compatibility_page import BAD, COMMITTED, PATCH, a_record, recorded

PATCHES = registry.patches()
INSTALLED = version_of("deepspeed")


# What is committed.


def test_every_release_was_tested_with_every_patch() -> None:
    assert COMMITTED.releases[0] == str(support.FIRST)
    assert not (untested := COMMITTED.untested()), support.closer(untested)


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_supports_releases_that_it_passed_on(name: str) -> None:
    """Whoever moves a range runs the releases again."""
    patch = PATCHES[name]
    claims = {(r.supported, r.fixed_in) for r in COMMITTED.of.values() if r.column == name}
    assert claims == {(patch.supported, patch.fixed_in)}, "make compatibility"
    for version in COMMITTED.releases:
        cell = COMMITTED.cell(version, name)
        if patch.fixed_in and Version(version) >= Version(patch.fixed_in):
            assert cell is Cell.FIXED_UPSTREAM, version
        elif release.covers(patch.supported, Version(version)):
            assert cell in (Cell.PASS, Cell.NOT_APPLICABLE), version
        else:
            assert cell in (Cell.REFUSED, Cell.NOT_APPLICABLE), version


# What a cell says.

GOOD = Outcome("0.19.9", passed=3)
NONE = Outcome("0.19.9", skipped=2, trouble="no test ran")


@pytest.mark.parametrize(
    ("state", "live", "outcome", "expected"),
    [
        (State.FIXED_UPSTREAM, False, GOOD, (Cell.FIXED_UPSTREAM, "the gate's")),
        (State.OUT_OF_RANGE, False, GOOD, (Cell.NOT_APPLICABLE, "the gate's")),
        (State.SHAPE_CHANGED, False, GOOD, (Cell.REFUSED, "the gate's")),
        (State.BLOCKED, False, GOOD, (Cell.REFUSED, "the gate's")),
        (State.BROKEN, False, GOOD, (Cell.UNKNOWN, "the gate's")),
        (State.READY, False, GOOD, (Cell.FAILED, "ImportError: no")),
        (State.READY, True, BAD, (Cell.FAILED, "tests.a::b")),
        (State.READY, True, NONE, (Cell.UNKNOWN, "no test ran")),
        (State.READY, True, GOOD, (Cell.PASS, "")),
    ],
)
def test_the_gate_speaks_before_the_tests(
    state: State, live: bool, outcome: Outcome, expected: tuple[Cell, str]
) -> None:
    """A pass takes a live patch and a test that ran; the core is tests alone."""
    assert judge(Answer(state, "the gate's", live, "ImportError: no"), outcome) == expected
    if live:
        assert judge(None, outcome) == expected


def test_an_installed_release_answers_for_itself() -> None:
    answer = matrix.ask(INSTALLED)
    assert set(answer) == set(PATCHES)
    for one in answer.values():
        assert one.live == (one.state is State.READY), one
    assert any(one.live for one in answer.values())


def test_a_release_with_other_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSPEED_TEST_RELEASES", str(tmp_path))
    # A wish of the caller's own is none of the matrix's business.
    monkeypatch.setenv("DS_PATCHES_FORCE", PATCH)
    newer = f"{Version(INSTALLED).major + 1}.0.0"
    fake.deepspeed(tmp_path / newer, newer)
    answer = matrix.ask(newer)[PATCH]
    assert judge(answer, NONE)[0] is Cell.REFUSED
    assert not answer.live
    with pytest.raises(matrix.NoAnswer, match=r"DeepSpeed 0\.0\.1 was asked for"):
        matrix.ask("0.0.1")


def test_each_column_counts_its_own_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = f"""
        import pytest
        def test_good(): pass
        @pytest.mark.parametrize("name", ["{PATCH}", "other"])
        def test_patch(name): assert name == "other"
    """
    fake.write(tmp_path / "tests/core/test_a.py", core)
    fake.write(tmp_path / "tests/world/test_world.py", "def test_world(): pass\n")
    fake.write(tmp_path / f"tests/{PATCH}/test_b.py", "import no_such_module\n")
    fake.write(tmp_path / f"tests/{PATCH}_more/test_c.py", "def test_other(): assert False\n")
    monkeypatch.setattr("tests.releases.ROOT", tmp_path)
    options = ("--continue-on-collection-errors", "--import-mode=importlib")
    _, cases = run_pytest("0.19.9", *options)

    def counted(column: str, *ready: str) -> tuple[int, int, str]:
        outcome = count("0.19.9", matrix.cases_of(column, cases, ready))
        return outcome.passed, outcome.failed, outcome.trouble

    assert counted(CORE, PATCH) == (3, 1, f"tests.core.test_a::test_patch[{PATCH}]")
    assert counted(CORE) == (3, 0, ""), "says nothing where the patch is refused"
    assert counted(PATCH, PATCH) == (0, 1, f"::tests.{PATCH}.test_b")


# What is run, and when.


class Measured:
    """Stands for the runs of a release: notes what was asked for, and lets it pass."""

    def __init__(self, stop_at: str = "") -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.stop_at = stop_at

    def __call__(self, version: str, columns: Sequence[str]) -> list[Record]:
        if version == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append((version, tuple(columns)))
        return [a_record(version, column) for column in columns]


def test_what_is_recorded_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into, measured, named = tmp_path / "c.json", Measured(), Measured()
    but = [
        a_record("0.16.0", CORE, torch="2.6.0"),
        a_record("0.16.1", CORE, sources="of yesterday"),
        a_record("0.16.2", PATCH, Cell.FAILED),
        a_record("0.16.3", PATCH, Cell.REFUSED),
    ]
    records = recorded("0.16.0", "0.16.1", "0.16.2", "0.16.3", but=but)
    record.save(records, into)
    assert record.load(into) == records
    assert matrix.run([], into=into, measure=measured) == 0
    assert sorted(measured.asked) == [("0.16.1", (CORE,)), ("0.16.2", (PATCH,))]
    printed = capsys.readouterr().out
    assert "0.16.0: recorded already" in printed
    assert f"0.16.1: {CORE}\n" in printed
    assert matrix.run(["0.16.3"], again=True, into=into, measure=named) == 0
    assert named.asked == [("0.16.3", columns.columns())]


def test_an_interrupted_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    into, rest = tmp_path / "c.json", Measured()
    record.save(Records().knowing(["0.16.0", "0.16.1"], "2026-01-01"), into)
    monkeypatch.setattr(releases, "AT_ONCE", 1)
    with pytest.raises(KeyboardInterrupt):
        matrix.run([], into=into, measure=Measured(stop_at="0.16.1"))
    assert into.with_suffix(".md").read_text() == page.render(record.load(into))
    assert matrix.run([], into=into, measure=rest) == 0
    assert rest.asked == [("0.16.1", columns.columns())]
    assert record.load(into) == recorded("0.16.0", "0.16.1")


def test_a_release_that_cannot_be_tested_stays_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(version: str, columns: Sequence[str]) -> list[Record]:
        raise matrix.NoAnswer("no such release")

    assert matrix.run(["0.16.0"], into=tmp_path / "c.json", measure=nothing) == 1
    assert "no such release" in capsys.readouterr().out
    assert not (tmp_path / "c.json").exists()


def test_another_patch_is_no_part_of_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "ROOT", tmp_path)
    edited = ("ds_patches/core/a.py", f"ds_patches/{PATCH}/a.py", f"tests/{PATCH}/a.py")
    for path in (*edited, "tests/world/test_world.py"):
        fake.write(tmp_path / path, "one\n")
    before = columns.sources(CORE), columns.sources(PATCH)
    for path in (
        *("ds_patches/symptoms.py", "ds_patches/commands/a.py", f"ds_patches/{PATCH}/__init__.py"),
        f"tests/{PATCH}/test_no_core_case.py",
    ):
        fake.write(tmp_path / path, "two\n")
    assert (columns.sources(CORE), columns.sources(PATCH)) == before
    fake.write(tmp_path / edited[2], "two\n")
    after = columns.sources(CORE), columns.sources(PATCH)
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)
    fake.write(tmp_path / edited[0], "two\n")
    assert columns.sources(CORE) != after[0]
    assert columns.sources(PATCH) != after[1], "a patch is applied by the core"


# A release that appears on the support.


def test_a_new_release_is_an_unknown_row_and_one_command(
    tmp_path: Path,
    no_package_index: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    into = tmp_path / "c.json"
    with pytest.raises(ValueError, match="deepspeed"):
        support.look(into)
    assert not into.exists(), "an index that does not answer changes nothing"

    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    record.save(recorded("0.19.7", "0.19.8"), into)
    for version in ("0.15.4", "0.19.8", "0.19.10", "0.20.0rc1"):
        (tmp_path / f"deepspeed-{version}.tar.gz").touch()
    assert support.look(into) == 1
    assert capsys.readouterr().out.rstrip().endswith("record 0.19.10")
    found = record.load(into)
    assert found.releases == ("0.19.7", "0.19.8", "0.19.10"), "none that was known is forgotten"
    unknown = " | ".join(["**unknown**"] * len(columns.columns()))
    assert f"\n| 0.19.10 | {unknown} |\n" in into.with_suffix(".md").read_text()

    record.save(found.adding(a_record("0.19.10", c) for c in columns.columns()), into)
    assert support.look(into) == 0
