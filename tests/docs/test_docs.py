"""The site builds without a broken link, every patch has its page, and commands exist."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from ds_patches import __main__ as command_line
from ds_patches.core import flags, registry, shape
from ds_patches.desk.defects import FIXES, KNOWN, TOLD, plain
from tests.core import fake
from tests.harness.stock import RELEASE, Version
from tests.shell import REPOSITORY

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


def text_of(page: str) -> str:
    """What a reader sees of it, on one line."""
    return " ".join(html.unescape(re.sub("<[^>]*>", "", page)).split())


@pytest.mark.parametrize("name", registry.patches())
def test_every_patch_has_its_page(site: Path, name: str) -> None:
    patch, page = registry.patch(name), (site / f"patches/{name}.html").read_text("utf-8")
    for other in ("index.html", "symptoms.html"):
        assert f'href="patches/{name}.html"' in (site / other).read_text("utf-8")
    for part in (patch.supported, *(target.qualname for target in patch.targets)):
        assert part in text_of(page), part
    assert all(f'href="{link.url}"' in page for link in patch.upstream)


def test_what_a_patch_says_of_its_cost_was_measured() -> None:
    """Each ratio stands on the page of benchmarks, beside its command."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    said = {}
    for name, patch in registry.patches().items():
        words = import_module(patch.hooks or f"ds_patches.{name}").__doc__ or ""
        said[name] = re.findall(r"\d\.\d\d", words.partition("\nCost\n")[2].partition("\n\n")[0])
    assert all(said[name] for name in ("accumulation", "coalesce")), "no costs were found"
    unknown = {name: [one for one in ratios if one not in page] for name, ratios in said.items()}
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


def test_every_symptom_has_its_row(site: Path) -> None:
    page, sections = (
        (site / f"{name}.html").read_text("utf-8") for name in ("symptoms", "troubleshooting")
    )
    text = text_of(page)
    for one in KNOWN:
        assert f'id="{one.anchor}"' in (page if one.anchor.startswith("fix-") else sections)
    for one in TOLD:
        assert f'href="troubleshooting.html#{one.anchor}"' in page
        assert plain(one.script) in text
    assert all(plain(fix.outcome) in text for fix in FIXES)


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


def test_the_cure_on_the_page_for_contributors_is_one(tmp_path: Path) -> None:
    page = (DOCS / "writing-a-patch.md").read_text(encoding="utf-8")
    (text,) = re.findall(
        r'^```python title="ds_patches/cures/mixed_dtypes.py"\n(.*?)^```$', page, re.M | re.S
    )
    fake.write(tmp_path / "cures/mixed_dtypes.py", text)
    shutil.copy(shape.RECORD, tmp_path)
    said = fake.output(fake.with_patches(tmp_path) + ASK)
    is_cured = Version("0.19.3") <= RELEASE
    told = (
        "has nothing that the patch wraps" if is_cured else "is applied: 1 of 1 wrappers in place"
    )
    assert told in said
