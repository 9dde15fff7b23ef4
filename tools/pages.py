"""What MkDocs does not find in docs/: a hook of mkdocs.yml.

A patch's page is made of its folder's docstring and its binding, so a new folder has its page and
its entry in the navigation without a line here. In the written pages `<!-- generated: NAME -->`
stands for a table. A link to a file of the repository outside docs/, which is no part of the site,
becomes the path of that file.
"""

from __future__ import annotations

import inspect
import itertools
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from ds_patches.commands import symptoms
from ds_patches.core import flags, registry
from ds_patches.core.patch import Dependency, Option, Patch, Place
from ds_patches.symptoms import SYMPTOMS

_FOLDER = "patches"
_MARKER = re.compile(r"<!-- generated: (\S+) -->")
_LINK = re.compile(r"\[([^\]]+)\]\(([\w./-]+)(#[\w-]*)?\)")
_PAGE_OF_DOCS = re.compile(r"docs/([\w-]+)\.md")
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
    "Option",
    "Options",
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


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the tables, and see to the links that leave docs/."""
    if page.file.src_uri.startswith("benchmarks"):
        page.meta["search"] = {"exclude": True}  # tables of numbers, with every patch's words
    repository = Path(config.docs_dir).parent
    with_tables = _MARKER.sub(lambda found: _table(found[1]), markdown)
    here = posixpath.dirname(page.file.src_uri)
    return _LINK.sub(lambda found: _link(found, here, repository), with_tables)


def page_of(patch: Patch) -> str:
    """Return the page of one patch. A section that its docstring lacks is the binding's."""
    summary, sections = _docstring(patch)
    if any(one.patch == patch.name for one in SYMPTOMS):
        table = symptoms.markdown("../troubleshooting.md", only=patch.name)
        sections[_CURES] = f'<div class="symptoms" markdown>\n\n{table}\n\n</div>'
    written = {
        "Why": patch.why,
        "How": patch.how,
        "Remove it when": patch.remove_when and f"{patch.remove_when}.",
    }
    sections = {name: text for name, text in written.items() if text} | sections
    names = sorted(sections, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    parts = [f"# {patch.name}", summary]
    parts += [f"## {name}\n\n{sections[name]}" for name in names]
    return "\n\n".join([*parts, "## At a glance", _glance(patch), *_touches(patch)]) + "\n"


def _uri(name: str) -> str:
    return f"{_FOLDER}/{name}.md"


def _docstring(patch: Patch) -> tuple[str, dict[str, str]]:
    """Return the summary and the sections: a line at the margin over an indented text."""
    text = inspect.getdoc(import_module(patch.package)) or f"{patch.summary}."
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
    ranks = "all ranks of an engine must have it alike" if patch.collectives else "each for itself"
    facts = [
        ("DeepSpeed", f"`{patch.supported}`"),
        ("Fixed upstream", f"{patch.fixed_in} and later" if patch.fixed_in else "in no release"),
        ("Upstream", links),
        ("Ranks", ranks),
        *((f"`{variable}`", meaning) for variable, meaning in _variables(patch)),
    ]
    return "\n".join(f"- **{name}**: {what}" for name, what in facts if what)


def _variables(patch: Patch) -> Iterator[tuple[str, str]]:
    """Return the patch's own variables with their values and meaning."""
    own = flags.variables({patch.name: patch})[len(flags.variables({})) :]
    meanings, defaults = [_switch(patch)], flags.defaults(patch)
    meanings += [f"{_values(one, defaults[one.name])}: {one.help}" for one in patch.options]
    return zip(own, meanings, strict=True)


def _switch(patch: Patch) -> str:
    meaning = "`1` or `0`: apply it or do not, whatever the lists say"
    choices = [_values(option) for option in patch.options if option.several]
    return "; ".join([meaning, *(f"{values}: apply it so" for values in choices)])


def _values(option: Option, default: str = "") -> str:
    usual = default.split(",")
    values = ", ".join(f"`{word}`" + " (default)" * (word in usual) for word in option.words)
    return f"one or more of {values}" if option.several else values


def _touches(patch: Patch) -> Iterator[str]:
    yield "## What it wraps"
    yield from _by_module(patch.targets)
    if patch.dependencies:
        yield "## What else it relies on"
        yield "If one of these changes, the patch is not applied."
        yield from _by_module(patch.dependencies)


def _by_module(places: Sequence[Place]) -> Iterator[str]:
    for module, some in itertools.groupby(sorted(places, key=_module), key=_module):
        yield f"`{module}`"
        yield "\n".join(f"- {_place(place)}" for place in some)


def _module(place: Place) -> str:
    return place.module


def _place(place: Any) -> str:
    releases = f" (`{place.releases}`)" if place.releases else ""
    return f"`{place.qualname}`{releases}" + (
        f": {place.why}" if isinstance(place, Dependency) else ""
    )


def _table(name: str) -> str:
    if name not in _TABLES:
        raise PluginError(f"no table is called {name!r}; the tables are: {', '.join(_TABLES)}")
    return _TABLES[name]()


def _symptoms() -> str:
    """The table of the README, with links to the pages."""
    return symptoms.markdown("troubleshooting.md", f"{_FOLDER}/{{}}.md")


def _patches() -> str:
    """A row for each patch, with its page."""
    titles = ("patch", "what it does", "DeepSpeed", "upstream", "remove it when")
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, patch in registry.patches().items():
        links = ", ".join(f"[{link.label}]({link.url})" for link in patch.upstream)
        page, supported = f"[`{name}`]({_uri(name)})", f"`{patch.supported}`"
        rows.append(f"| {page} | {patch.summary} | {supported} | {links} | {patch.remove_when} |")
    return "\n".join(rows)


def _options() -> str:
    """A row for each variable that belongs to a patch."""
    rows = ["| variable | patch | meaning |", "|---|---|---|"]
    for name, patch in registry.patches().items():
        for variable, meaning in _variables(patch):
            cell = meaning.replace("|", r"\|")
            rows.append(f"| `{variable}` | [{name}]({_uri(name)}) | {cell} |")
    return "\n".join(rows)


def _older() -> str:
    """What was recorded of other code than there is now."""
    from tests.releases import columns, record  # beside this file, and heavier than the rest

    now = {column: columns.sources(column) for column in columns.columns()}
    found = record.load().of.values()
    older = Counter(one.column for one in found if one.sources != now[one.column])
    if not older:
        return "Every cell is of the code that this page was built from."
    cells = ", ".join(f"`{column}` ({count} cells)" for column, count in older.items())
    return f"Older than the code that this page was built from: {cells}."


_TABLES = {"symptoms": _symptoms, "patches": _patches, "options": _options, "older": _older}


def _link(found: re.Match[str], here: str, repository: Path) -> str:
    label, target = found[1], posixpath.normpath(posixpath.join(here, found[2]))
    outside = target.removeprefix("../")
    if outside == target:
        return found[0]
    if not (repository / outside).exists():
        return found[0]  # MkDocs says that it leads nowhere
    return f"`{outside}`" if outside in label else f"{label} (`{outside}`)"
