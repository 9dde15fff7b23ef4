"""What MkDocs does not find in docs/: a hook of mkdocs.yml.

A patch's page is made of its folder's docstring and its binding, so a new folder has its page and
its entry in the navigation without a line here. In the written pages `<!-- generated: NAME -->`
stands for a table. A link to a file of the repository outside docs/, which is no part of the site,
becomes the path of that file.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from packaging.version import Version

import ds_patches
from ds_patches.core import registry
from ds_patches.core.patch import Patch, Place, Target
from ds_patches.desk import cured
from ds_patches.desk.defects import DEFECTS, DOINGS, FIXES, SETTINGS, TOLD, Defect

_ROOT = Path(__file__).parents[1]
_FOLDER = "patches"
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
#: A table of more is a matrix, which scrolls.
_MOST_COLUMNS = 9
_MARKER = re.compile(r"<!-- generated: (\S+) -->")
_LINK = re.compile(r"\[([^\]]+)\]\(([\w./-]+)(#[\w-]*)?\)")
_PAGE_OF_DOCS = re.compile(r"docs/([\w-]+)\.md")
#: A row of a walk through the code: a file of the package, and a function or class in it.
_STEP = re.compile(r"(?<=^\| `)([\w/.]+)(` \| `)([\w.]+)(?=`)", re.M)
_PULL = "https://github.com/deepspeedai/DeepSpeed/pull"
_CURES = "What it cures"
#: Of a page's sections; others come last.
_ORDER = (
    "Use",
    "What",
    _CURES,
    "Arguments",
    "If something raises",
    "no_sync()",
    "Risks",
    "What to know",
    "Not covered",
    "Cost",
    "Why",
    "How",
    "Upstream",
    "Remove it when",
)
_HEADING = re.compile(r"^(\S.*)\n(?=    )", re.MULTILINE)


def on_config(config: MkDocsConfig) -> None:
    """Put the pages of the patches where the navigation says `patches/*.md`."""
    for entry in config.nav or ():
        for title, target in entry.items():
            if target == f"{_FOLDER}/*.md":
                entry[title] = [{name: _uri(name)} for name in registry.patches()]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages of the patches."""
    for name, patch in registry.patches().items():
        files.append(File.generated(config, _uri(name), content=page_of(patch)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tell each cell of a wide table its column, which a phone shows in front of it."""
    return _TABLE.sub(lambda found: _labelled(found[0]), html)


def _labelled(table: str) -> str:
    titles = [re.sub("<.*?>", "", title) for title in re.findall(r"<th.*?>(.*?)</th>", table)]
    if not 4 <= len(titles) <= _MOST_COLUMNS:
        return table
    labels = itertools.cycle(titles)
    table = table.replace("<table>", "<table data-wide>")
    return re.sub("<td", lambda _: f'<td data-label="{next(labels)}"', table)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the tables, and see to the links that leave docs/."""
    if page.file.src_uri.startswith("benchmarks"):
        page.meta["search"] = {"exclude": True}  # tables of numbers, with every patch's words
    repository = Path(config.docs_dir).parent
    with_tables = _MARKER.sub(lambda found: _table(found[1]), markdown)
    if page.file.src_uri == "how-it-works.md":
        with_tables = _STEP.sub(_with_line, with_tables)
    here = posixpath.dirname(page.file.src_uri)
    return _LINK.sub(lambda found: _link(found, here, repository), with_tables)


def line_of(file: str, name: str) -> int:
    """Return the line of a file of the package in which a function or class begins."""
    scope: Any = ast.parse(
        (Path(str(ds_patches.__file__)).parent / file).read_text(encoding="utf-8")
    )
    for part in name.split("."):
        scope = next(one for one in scope.body if getattr(one, "name", None) == part)
    return int(scope.lineno)


def _with_line(step: re.Match[str]) -> str:
    return f"{step[1]}:{line_of(step[1], step[3])}{step[2]}{step[3]}"


def page_of(patch: Patch) -> str:
    """Return the page of one patch."""
    summary, sections = _docstring(patch)
    if any(one.patch == patch.name for one in TOLD):
        table = _symptoms("../troubleshooting.md", only=patch.name)
        sections[_CURES] = f'<div class="symptoms" markdown>\n\n{table}\n\n</div>'
    if patch.remove_when:
        sections["Remove it when"] = f"{patch.remove_when}."
    names = sorted(sections, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    parts = [f"# {patch.name}", summary]
    parts += [f"## {name}\n\n{sections[name]}" for name in names]
    return "\n\n".join([*parts, "## At a glance", _glance(patch), *_touches(patch)]) + "\n"


def _uri(name: str) -> str:
    return f"{_FOLDER}/{name}.md"


def _docstring(patch: Patch) -> tuple[str, dict[str, str]]:
    """Return the summary and the sections: a line at the margin over an indented text."""
    home = import_module(patch.hooks or f"ds_patches.{patch.name}")
    text = inspect.getdoc(home) or f"{patch.summary}."
    text = text.replace("``", "`")
    summary, *rest = _HEADING.split(_PAGE_OF_DOCS.sub(_page_link, text))
    bodies = (inspect.cleandoc(f"\n{body}") for body in rest[1::2])
    return summary.strip(), dict(zip(rest[::2], bodies, strict=True))


def _page_link(found: re.Match[str]) -> str:
    """A link that is named like its file: "benchmarks: coalesce"."""
    kind, dash, of = found[1].partition("-")
    label = f"{kind}: {of.replace('-', '_')}" if kind == "benchmarks" and dash else found[1]
    return f"[{label.replace('-', ' ')}](../{found[1]}.md)"


def _glance(patch: Patch) -> str:
    links = ", ".join(f"[{link.label}]({link.url})" for link in patch.upstream)
    ranks = "all ranks of an engine must have it" if patch.collectives else "any rank may have it"
    facts = [
        ("DeepSpeed", f"`{patch.supported}`"),
        ("Upstream", links),
        ("Ranks", ranks),
    ]
    return "\n".join(f"- **{name}**: {what}" for name, what in facts if what)


def _touches(patch: Patch) -> Iterator[str]:
    yield "## What it wraps"
    yield from _by_module(patch.targets, lambda one: _why(patch, one))
    if patch.dependencies:
        yield "## What else it relies on"
        yield "If one of these changes, the patch is not applied."
        yield from _by_module(patch.dependencies, lambda one: one.why)


def _by_module(places: Sequence[Any], why: Callable[[Any], str]) -> Iterator[str]:
    for module, some in itertools.groupby(sorted(places, key=_module), key=_module):
        yield f"`{module}`"
        yield "\n".join(f"- {_place(place)}: {why(place)}" for place in some)


def _why(patch: Patch, target: Target) -> str:
    """The first line of a wrapper's docstring says what DeepSpeed does, and what is done here."""
    text = inspect.getdoc(patch.hook(target.wrapper)) or ""
    return text.partition("\n\n")[0].replace("``", "`").replace("\n", " ")


def _module(place: Place) -> str:
    return place.module


def _place(place: Any) -> str:
    return f"`{place.qualname}`" + (f" (`{place.releases}`)" if place.releases else "")


def _table(name: str) -> str:
    if name not in _TABLES:
        raise PluginError(f"no table is called {name!r}; the tables are: {', '.join(_TABLES)}")
    return _TABLES[name]()


def _symptoms(page: str = "troubleshooting.md", only: str = "") -> str:
    """A row for each defect; of one patch, those that it cures, without the column for it."""
    titles = ("what you run", "what happens", "ZeRO", "wrong from", "right from", "cure")
    rows = [titles, ("---",) * len(titles)]
    if only:
        rows += [_row(one, page) for one in TOLD if one.patch == only]
        return "\n".join(f"|{'|'.join(row[:5])}|" for row in rows)
    ids = Counter[str]()
    for one in (*TOLD, *reversed(FIXES)):
        what, *others = _row(one, page)
        rows.append((f"{_id(one.anchor, ids)} {what}{_links(one)}{_needs(one.needs)}", *others))
    return "\n".join(f"|{'|'.join(row)}|" for row in rows)


def _id(name: str, ids: Counter[str]) -> str:
    """A link of a row to itself."""
    ids[name] += 1
    name += f"-{ids[name]}" * (ids[name] > 1)
    return f"[#](#{name}){{ #{name} }}"


def _row(one: Defect, page: str) -> tuple[str, ...]:
    cure = " and ".join(filter(None, (one.patch and f"[{one.patch}]({_uri(one.patch)})", one.do)))
    cure += f", on {floor} and later" if (floor := cured.floor(one)) else ""
    stages = ", ".join(map(str, one.stages))
    what = f"[{one.script}]({page}#{one.section})" if one.section else f"fixed in {one.right}"
    outcome = f"{one.outcome}{_measured(one)}"
    return what, outcome, stages, one.first, one.right or "none", cure or f"{one.right} or later"


def _links(one: Defect) -> str:
    links = ", ".join(f"[#{number}]({_PULL}/{number})" for number in one.numbers.split())
    return f"{': ' * bool(links)}{links}"


def _needs(names: str) -> str:
    """What brings it about, as the page's chooser reads it."""
    needs = [name for name in names.split() if name in {*SETTINGS, *DOINGS} - {"script"}]
    return f"<br><small>{', '.join(needs)}</small>" if needs else ""


def _measured(one: Defect) -> str:
    """What its proof comes to, as `python -m tests.releases measure` has written."""
    of = _proofs().get(one.proof, {})
    releases = sorted((at for at in of if one.is_wrong(Version(at))), key=Version)
    if not releases:
        return ""
    stock: dict[str, list[str]] = {}
    for at in releases:
        stock.setdefault(of[at]["stock"], []).append(at)
    told = ", ".join(f"{_off(what)} on {' and '.join(at)}" for what, at in stock.items())
    worst = max((of[at]["patched"] for at in releases), key=float)
    return f"<br><small>Measured: {told}; patched {_off(worst)}.</small>"


@cache
def _proofs() -> dict[str, dict[str, dict[str, str]]]:
    """By proof and release, what stock and patched come to."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads(
        (_ROOT / "docs" / "measured.json").read_text(encoding="utf-8")
    )
    return found


def _off(told: str) -> str:
    return f"`{told}`" if told.isidentifier() else f"off by {told}"


def _patches() -> str:
    """A row for each patch, with its page."""
    titles = ("patch", "what it does", "DeepSpeed", "upstream", "remove it when")
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, patch in registry.patches().items():
        links = ", ".join(f"[{link.label}]({link.url})" for link in patch.upstream)
        page, supported = f"[`{name}`]({_uri(name)})", f"`{patch.supported}`"
        rows.append(f"| {page} | {patch.summary} | {supported} | {links} | {patch.remove_when} |")
    return "\n".join(rows)


def _words() -> str:
    """A row for each word that stands small in the first column."""
    rows = ["|word|what it is|", "|---|---|"]
    used = {name for one in DEFECTS for name in one.needs.split()}
    for name, places in SETTINGS.items():
        keys = " or ".join(f"`{place.partition('=')[0]}`" for place in places)
        rows += [f"|{name}|{keys}|"] * (name in used)
    rows += [f"|{name}|{what}|" for name, what in DOINGS.items()]
    return "\n".join(rows)


def _readme() -> str:
    """The README, up to its links to what the navigation has."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    return text.partition("\n## Read on")[0].replace("](docs/", "](")


_TABLES = {
    "readme": _readme,
    "symptoms": _symptoms,
    "patches": _patches,
    "words": _words,
}


def _link(found: re.Match[str], here: str, repository: Path) -> str:
    label, target = found[1], posixpath.normpath(posixpath.join(here, found[2]))
    outside = target.removeprefix("../")
    if outside == target:
        return found[0]
    if not (repository / outside).exists():
        return found[0]  # MkDocs says that it leads nowhere
    return f"`{outside}`" if outside in label else f"{label} (`{outside}`)"
