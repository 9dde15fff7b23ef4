"""The site's search in a real browser: what people type has its answer on top."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.test_docs import site
from tests.explain.test_explain import TYPED

__all__ = ["site"]
CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--virtual-time-budget=20000", "--dump-dom"),
)


@pytest.fixture(scope="module")
def typed(site: Path) -> Path:
    """A page where what the address ends in is typed as a user does: the search hears of it."""
    page = (site / "index.html").read_text(encoding="utf-8")
    script = """<script>addEventListener("load", () => {
  const field = document.querySelector(".md-search__input");
  document.querySelector("#__search").click();
  field.focus();
  field.value = decodeURIComponent(location.hash.slice(1));
  const type = () => field.dispatchEvent(new Event("keyup", {bubbles: true}));
  for (let at = 0; at < 15000; at += 500) setTimeout(type, at);
});</script></body>"""
    file = site / "typed.html"
    file.write_text(page.replace("</body>", script), encoding="utf-8")
    return file


@pytest.mark.exhaustive
@pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium")
@pytest.mark.parametrize(("text", "anchor"), TYPED.items(), ids=lambda value: value[:30])
def test_the_top_hit_is_right(typed: Path, tmp_path: Path, text: str, anchor: str) -> None:
    address = f"file://{typed}#{text.replace(' ', '%20')}"
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = done.stdout.partition('class="md-search-result__list"')[2]
    (top, *_) = re.findall(r'href="([^"]+)"', found) or [""]
    articles = re.findall(r"troubleshooting\.html(?:\?[^#\"]*)?#([\w-]+)", found)
    assert "troubleshooting.html" in top
    assert articles[:1] == [anchor]


def test_benchmarks_are_not_searched(site: Path) -> None:
    index = (site / "search/search_index.js").read_text(encoding="utf-8")
    assert "troubleshooting.html#clipped" in index
    assert "benchmarks" not in re.findall(r'"location":"([\w-]+)', index)
