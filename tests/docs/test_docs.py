"""Pages are up to date, every link works where they are read, and commands exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomllib

from ds_patches import __main__ as command_line
from ds_patches.core import flags, registry, shape
from ds_patches.diagnostics.defects import DEFECTS, TABLE
from tests.core import fake
from tests.harness.stock import RELEASE, Version
from tests.shell import REPOSITORY
from tools import pages

DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
PAGES += DOCS.glob("*.md")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it: a link that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = {"PYTHONPATH": str(REPOSITORY), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_what_is_generated_is_up_to_date() -> None:
    """Else: make pages."""
    stale = [page.name for page, text in pages.generated().items() if page.read_text() != text]
    assert not stale, "make pages"
    assert {page.stem for page in (DOCS / "patches").glob("*.md")} == {*registry.patches()}


@pytest.mark.parametrize("name", registry.patches())
def test_a_page_says_what_it_has_to(name: str) -> None:
    text = (DOCS / f"patches/{name}.md").read_text("utf-8")
    for title in ("Use", "What it cures", "Cost", "Why", "How", "At a glance"):
        assert f"\n## {title}\n" in text, title
    assert registry.patch(name).upstream or "No issue was found." in text


LINK = re.compile(r"!?\[[^]]*\]\(([^)\s]+)\)")
PLAIN_HEADING = re.compile(r"^#+ ([\w -]+)$", re.MULTILINE)


def dead_links(page: Path) -> list[str]:
    """The links of a page that a Git host cannot follow.

    An anchor is an `<a id>`, or a heading of plain words, which every renderer names alike.
    """
    dead = []
    for link in LINK.findall(page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if re.match(r"\w+:", link):
            continue
        if not target.exists():
            dead.append(link)
        elif anchor:
            text = target.read_text("utf-8")
            plain = [title.lower().replace(" ", "-") for title in PLAIN_HEADING.findall(text)]
            if f'<a id="{anchor}">' not in text and anchor not in plain:
                dead.append(link)
    return dead


def test_links_work_in_the_repository_and_in_the_wheel(tmp_path: Path) -> None:
    """The wheel has docs/ alone; the site is built strictly."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    packed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for source, target in packed.items():
        if (REPOSITORY / source).is_dir():
            shutil.copytree(REPOSITORY / source, tmp_path / target)
    every = [*PAGES, *(DOCS / "patches").glob("*.md"), *tmp_path.rglob("*.md")]
    assert len(every) > 2 * len(registry.patches())
    assert not {str(page): links for page in every if (links := dead_links(page))}


def test_what_a_patch_says_of_its_cost_was_measured() -> None:
    """Each ratio stands on the page of benchmarks, beside its command."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    ratios = {}
    for name in registry.patches():
        words = (DOCS / f"patches/{name}.md").read_text("utf-8")
        cost = words.partition("## Cost\n")[2].partition("\n## ")[0]
        ratios[name] = re.findall(r"\d\.\d\d", cost)
    assert all(ratios[name] for name in ("accumulation", "coalesce")), "no costs were found"
    unknown = {name: [ratio for ratio in of if ratio not in page] for name, of in ratios.items()}
    assert not any(unknown.values()), unknown


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    """Nor does its search, which has to work from the disk."""
    pages = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    loaded = [
        re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="([^"]+)"', page) for page in pages
    ]
    assert all(loaded)
    assert not [url for urls in loaded for url in urls if "//" in url]
    assert (site / "search/search_index.js").is_file()


def test_every_symptom_has_its_row() -> None:
    page, sections = (
        (DOCS / f"{name}.md").read_text("utf-8") for name in ("symptoms", "troubleshooting")
    )
    for defect in TABLE:
        text = page if defect.anchor.startswith("fix-") else sections
        assert f'<a id="{defect.anchor}">' in text
    for defect in DEFECTS:
        assert (defect.script if defect.section else defect.outcome) in page


def test_what_the_readme_shows_is_what_doctor_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = '{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}'
    Path("ds_config.json").write_text(settings)
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    (command,) = re.findall(r"^ds-patches (doctor .* --release .*)$", readme, re.M)
    command_line.main(command.split())
    assert f"```text\n{capsys.readouterr().out.partition('IF YOUR')[0]}```" in readme


def test_every_flag_is_on_the_page_of_flags() -> None:
    text = (DOCS / "flags.md").read_text(encoding="utf-8")
    assert not [flag for flag in flags.VARIABLES if f"`{flag}=" not in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    ours = re.findall(r"(?:python -m ds_patches|ds-patches) ([a-z-]+)", text)
    made = re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE)
    modules = re.findall(r"-m ((?:benchmarks|examples|tests)[\w.]*)", text)
    missing = [name for name in ours if f"    {name} " not in command_line._parser().format_help()]
    missing += [name for name in made if name not in targets]
    missing += [name for name in modules if not find_spec(name.rstrip("."))]
    assert not missing


ASK = """
import ds_patches
from ds_patches import mixed_dtypes

assert mixed_dtypes.is_applied() is False
print(ds_patches.apply_all(only="mixed_dtypes")["mixed_dtypes"])
"""


@pytest.mark.exhaustive
def test_the_cure_on_the_page_for_contributors_is_one(tmp_path: Path) -> None:
    page = (DOCS / "writing-a-patch.md").read_text(encoding="utf-8")
    (text,) = re.findall(
        r'^```python title="ds_patches/cures/mixed_dtypes.py"\n(.*?)^```$', page, re.M | re.S
    )
    fake.write(tmp_path / "cures/mixed_dtypes.py", text)
    shutil.copy(shape.RECORD, tmp_path)
    printed = fake.run(fake.with_patches(tmp_path) + ASK).stdout
    is_cured = Version("0.19.3") <= RELEASE
    words = (
        "has none of the functions that the patch wraps"
        if is_cured
        else "is applied: 1 of 1 wrappers in place"
    )
    assert words in printed
