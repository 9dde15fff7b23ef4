"""The site: it builds strictly, every patch has its page, and it says what the code says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ds_patches import __main__ as command_line
from ds_patches.core import flags, registry
from ds_patches.core.state import State
from ds_patches.symptoms import SYMPTOMS
from tests.core import fake
from tests.releases import columns, record

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
#: What the site is built of.
SOURCES = (
    *("docs", "tools", "ds_patches", "benchmarks", "examples", "tests"),
    *("mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
)


def build(repository: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of this copy of the repository as `make docs` does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    variables = {"PYTHONPATH": str(repository), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=repository, env=os.environ | variables, capture_output=True, text=True
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository of what the site is built of."""
    for source in (ROOT / name for name in SOURCES):
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, tmp_path / source.name, ignore=ignore)
        else:
            shutil.copy(source, tmp_path)
    return tmp_path


def files_on(page: str) -> dict[str, str]:
    """The files that a page shows whole, by the path it gives them."""
    fence = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
    return dict(fence.findall((DOCS / page).read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", registry.patches())
def test_every_patch_has_its_page(site: Path, name: str) -> None:
    patch = registry.patch(name)
    page = _Page(site / f"patches/{name}.html")
    own = flags.variables({name: patch})[len(flags.variables({})) :]
    whys = [one.why for one in patch.dependencies] + [option.help for option in patch.options]
    for part in (patch.supported, *own, *whys, *(t.qualname for t in patch.targets)):
        assert part in page.text, part
    assert {link.url for link in patch.upstream} <= set(page.links)
    assert "`" not in page.text, "markup that was not understood"


def test_every_symptom_and_every_patch_has_its_row(site: Path) -> None:
    page = _Page(site / "symptoms.html")
    for one in SYMPTOMS:
        assert f"troubleshooting.html#{one.anchor}" in page.links
        assert not one.patch or f"patches/{one.patch}.html" in page.links
        for cell in (one.script, one.outcome, one.add):
            assert cell.replace("`", "") in page.text
    index = _Page(site / "index.html")
    for name, patch in registry.patches().items():
        assert f"patches/{name}.html" in index.links
        for cell in (patch.summary, patch.remove_when, *(link.label for link in patch.upstream)):
            assert cell in index.text


def test_the_flags_of_site_and_code_are_the_same(site: Path) -> None:
    page = _Page(site / "flags.html").text
    for variable in flags.variables(registry.patches()):
        assert variable in page
    table = (
        (DOCS / "flags.md")
        .read_text(encoding="utf-8")
        .partition("\n## Variables for all patches\n")[2]
    )
    named = re.findall(r"^\| `(DS_PATCHES[\w<>]*)=", table.partition("\n## ")[0], re.MULTILINE)
    of_one_patch = {"DS_PATCHES_<NAME>", "DS_PATCHES_<NAME>_<OPTION>"}
    assert len(named) == len(set(named))
    assert set(named) == {*flags.variables({}), *of_one_patch}


def test_every_state_is_explained() -> None:
    using = (DOCS / "using.md").read_text(encoding="utf-8")
    table = using.partition("### States")[2].partition("\n### ")[0]
    assert re.findall(r"^\| `([\w ]+)` \|", table, re.MULTILINE) == [s.value for s in State]


def test_every_command_in_the_docs_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"(?:python -m ds_patches|ds-patches) ([a-z-]+)", text):
            assert name in command_line._COMMANDS, (page.name, name)
        for name in re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE):
            assert name in targets, (page.name, name)


def test_a_record_of_older_code_reads_as_old(site: Path) -> None:
    now = {column: columns.sources(column) for column in columns.columns()}
    older = [one.column for one in record.load().of.values() if one.sources != now[one.column]]
    said = _Page(site / "compatibility.html").text
    assert all(f"{column} ({older.count(column)} cells)" in said for column in older)
    assert older or "Every cell is of the code that this page was built from." in said


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        links = _Page(page)
        assert links.loaded
        assert not [url for url in links.loaded if "//" in url], page


def test_the_search_works_from_the_disk(site: Path) -> None:
    """A page of a file may not fetch the index, nor start a worker."""
    assert (site / "search/search_index.js").read_text(encoding="utf-8").startswith("var __index")
    for page in site.rglob("*.html"):
        assert [url for url in _Page(page).loaded if url.endswith("iframe-worker.js")], page


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("page", "text", "complaint"),
    [
        ("using.md", "[there](flags.md#nowhere)", "#nowhere"),
        ("using.md", "[there](../nowhere.py)", "nowhere.py"),
        ("using.md", "<!-- generated: nothing -->", "no table is called 'nothing'"),
        ("orphan.md", "# In no navigation", "orphan.md"),
    ],
)
def test_what_is_broken_fails_the_build(copy: Path, page: str, text: str, complaint: str) -> None:
    with (copy / "docs" / page).open("a", encoding="utf-8") as file:
        file.write(f"\n{text}\n")
    done = build(copy, copy / "site")
    assert done.returncode != 0
    assert complaint in done.stdout + done.stderr


def test_a_link_out_of_docs_becomes_a_path(site: Path) -> None:
    shown = _Page(site / "coalesce-in-practice.html").text
    assert "examples/gradcache (examples/gradcache/train.py)" in shown
    named_so = _Page(site / "benchmarks-coalesce.html").text
    assert "benchmarks/README.md" in named_so
    assert "(benchmarks/README.md)" not in named_so


@pytest.mark.exhaustive
def test_a_new_patch_has_its_page_without_an_edit(copy: Path) -> None:
    """And of its option's choices it may have several."""
    for path, text in files_on("writing-a-patch.md").items():
        if path != "pyproject.toml":  # which makes it another package's
            file = copy / path.replace("our_patches", "ds_patches")
            fake.write(file, text.replace("our_patches", "ds_patches"))
    binding = copy / "ds_patches/loud_scale/binding.py"
    text = fake.edited(binding.read_text(encoding="utf-8"), '"both", (', '("down",), (')
    binding.write_text(fake.edited(text, '("both", "down")', '("up", "down")'), encoding="utf-8")
    done = build(copy, copy / "site")
    assert done.returncode == 0, done.stderr
    page = _Page(copy / "site/patches/loud_scale.html").text
    assert "A warning whenever DynamicLossScaler has raised" in page, "its docstring's section"
    assert "a higher one not at all" in page, "its binding's, where the docstring has none"
    for unsaid in ("How", "Remove it when", "Upstream"):
        assert unsaid not in page
    assert "patches/loud_scale.html" in _Page(copy / "site/using.html").links
    flags_page = _Page(copy / "site/flags.html").text
    assert "DS_PATCHES_LOUD_SCALE_MOVES" in flags_page
    for found in (flags_page, page):
        assert "one or more of up, down (default), all: which moves are said" in found
        assert "whatever the lists say; one or more of up, down, all: apply it so" in found


class _Page(HTMLParser):
    """A page of the site: where it points to, what a browser loads to show it, and its text."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self._parts: list[str] = []
        self._in_article = False
        self.feed(file.read_text(encoding="utf-8"))
        self.text = " ".join("".join(self._parts).split())  # on one line

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._in_article |= tag == "article"
        if tag == "a":
            self.links.append(found.get("href") or "")
        elif url := found.get("src") or (found.get("href") if tag == "link" else None):
            self.loaded.append(url)

    def handle_endtag(self, tag: str) -> None:
        self._in_article &= tag != "article"

    def handle_data(self, data: str) -> None:
        if self._in_article:
            self._parts.append(data)
