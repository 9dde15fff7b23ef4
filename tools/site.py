"""A hook of mkdocs.yml, which adds to the pages of docs/. It needs MkDocs alone."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
#: A table of more is a matrix, which scrolls.
_MOST_COLUMNS = 9
#: Pages of wide tables have no list of contents.
_WIDE = ("index.md", "symptoms.md")


def on_config(config: MkDocsConfig) -> None:
    """List the patches where the navigation names their folder."""
    for entry in config.nav or ():
        for title, target in entry.items():
            if target == "patches/*.md":
                pages = sorted(Path(config.docs_dir).glob(target))
                entry[title] = [{page.stem: f"patches/{page.name}"} for page in pages]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri in _WIDE:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri == "benchmarks.md":
        page.meta["search"] = {"exclude": True}  # tables of numbers, with every patch's words
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Label each cell of a wide table with its column, which a phone shows in front of it."""
    return _TABLE.sub(lambda table: _labelled(table[0]), html)


def _labelled(table: str) -> str:
    titles = [re.sub("<.*?>", "", title) for title in re.findall(r"<th.*?>(.*?)</th>", table)]
    if not 4 <= len(titles) <= _MOST_COLUMNS:
        return table
    labels = itertools.cycle(titles)
    table = table.replace("<table>", "<table data-wide>")
    return re.sub("<td", lambda _: f'<td data-label="{next(labels)}"', table)
