"""`python -m tools.pages`: writes the generated parts of the pages into docs/.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`. It is made of the table of
defects, of the bindings of the patches, or of the README; all else on a page is written by hand.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from ds_patches.core import registry
from ds_patches.core.patch import Patch, Target
from ds_patches.diagnostics import findings
from ds_patches.diagnostics.defects import (
    DEFECTS,
    DOCUMENTED,
    FIXES,
    SCRIPT_ACTIONS,
    SETTINGS,
    Defect,
    wrong_in,
)

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_PART = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_PULL = "https://github.com/deepspeedai/DeepSpeed/pull"


def main() -> None:
    for page, text in generated().items():
        page.write_text(text, encoding="utf-8")


def generated() -> dict[Path, str]:
    """Return the text that each page with a generated part should have."""
    pages = {page: page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}
    return {page: _filled(page, text) for page, text in pages.items() if _PART.search(text)}


def _filled(page: Path, text: str) -> str:
    of_page = {"readme": _readme, "symptoms": _symptoms, "patches": _patches, "words": _words}
    of_patch = {"cures": _cures, "glance": _glance}

    def fill(part: re.Match[str]) -> str:
        name = part[2]
        made = of_page[name]() if name in of_page else of_patch[name](registry.patch(page.stem))
        return f"{part[1]}\n{made}\n\n{part[3]}"

    return _PART.sub(fill, text)


def _cures(patch: Patch) -> str:
    """Return a row for each defect that the patch cures."""
    rows = [_cells(defect, "../")[:5] for defect in wrong_in(patch=patch.name) if defect.section]
    return _table(("what you run", "what happens", "ZeRO", "wrong from", "right from"), rows)


def _glance(patch: Patch) -> str:
    ranks = "all ranks of an engine must have it" if patch.collectives else "any rank may have it"
    facts = {
        "DeepSpeed": f"`{patch.supported}`",
        "Upstream": _upstream(patch),
        "Ranks": ranks,
        "Requires": ", ".join(f"[{name}]({name}.md)" for name in patch.requires),
        "Remove it when": patch.remove_when,
    }
    lines = "\n".join(f"- **{name}**: {text}" for name, text in facts.items() if text)
    wraps = _by_module(patch.targets, lambda target: _does(patch, target))
    parts = [lines, "## What it wraps", *wraps]
    if patch.dependencies:
        parts += ["## What else it relies on", "If one of these changes, it is not applied."]
        parts += _by_module(patch.dependencies, lambda dependency: dependency.why)
    return "\n\n".join(parts)


def _by_module(places: Sequence[Any], why: Any) -> Iterator[str]:
    def module(place: Any) -> str:
        return str(place.module)

    for name, group in itertools.groupby(sorted(places, key=module), key=module):
        yield f"`{name}`"
        yield "\n".join(f"- {_place(place)}: {why(place)}" for place in group)


def _does(patch: Patch, target: Target) -> str:
    """Return the summary of a wrapper's docstring: what DeepSpeed does, and what is done here."""
    text = inspect.getdoc(patch.function(target.wrapper)) or ""
    return text.partition("\n\n")[0].replace("``", "`").replace("\n", " ")


def _place(place: Any) -> str:
    return f"`{place.qualname}`" + (f" (`{place.releases}`)" if place.releases else "")


def _upstream(patch: Patch) -> str:
    return ", ".join(f"[{link.label}]({link.url})" for link in patch.upstream)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"|{'|'.join(row)}|" for row in (titles, ("---",) * len(titles), *rows))


def _symptoms() -> str:
    """Return a row for each defect."""
    ids = Counter[str]()
    rows = []
    for defect in (*DOCUMENTED, *reversed(FIXES)):
        script, *others = _cells(defect)
        name = defect.anchor
        ids[name] += 1
        name += f"-{ids[name]}" * (ids[name] > 1)
        anchor = f'<a id="{name}"></a>[#](#{name})'
        rows.append((f"{anchor} {script}{_links(defect)}{_needs(defect)}", *others))
    titles = ("what you run", "what happens", "ZeRO", "wrong from", "right from", "cure")
    return _table(titles, rows)


def _cells(defect: Defect, up: str = "") -> tuple[str, ...]:
    """Return a defect's row; up: the way to docs/ from the page."""
    script = f"fixed in {defect.right}"
    if defect.section:
        script = f"[{defect.script}]({up}troubleshooting.md#{defect.section})"
    patch = defect.patch and f"[{defect.patch}]({up}patches/{defect.patch}.md)"
    cure = " and ".join(filter(None, (patch, defect.do))) or f"{defect.right} or later"
    cure += f", on {floor} and later" if (floor := findings.floor(defect)) else ""
    stages = ", ".join(map(str, defect.stages))
    outcome = f"{defect.outcome}{_measured(defect)}"
    return script, outcome, stages, defect.first, defect.right or "none", cure


def _links(defect: Defect) -> str:
    links = ", ".join(f"[#{number}]({_PULL}/{number})" for number in defect.numbers.split())
    return f": {links}" if links else ""


def _needs(defect: Defect) -> str:
    """Return what brings the defect about, as the chooser of the site reads it."""
    needs = [n for n in defect.needs.split() if n in {*SETTINGS, *SCRIPT_ACTIONS} - {"script"}]
    return f"<br><small>{', '.join(needs)}</small>" if needs else ""


def _measured(defect: Defect) -> str:
    """Return the result of the defect's proof, as `tools.releases measure` has recorded it."""
    measured = _proofs().get(defect.proof, {})
    releases = sorted((v for v in measured if defect.is_wrong(Version(v))), key=Version)
    if not releases:
        return ""
    stock: dict[str, list[str]] = {}
    for version in releases:
        stock.setdefault(measured[version]["stock"], []).append(version)
    results = ", ".join(f"{_off(off)} on {' and '.join(wrong)}" for off, wrong in stock.items())
    worst = max((measured[version]["patched"] for version in releases), key=float)
    return f"<br><small>Measured: {results}; patched {_off(worst)}.</small>"


@cache
def _proofs() -> dict[str, dict[str, dict[str, str]]]:
    """Return by proof and release what stock and patched come to."""
    data: dict[str, dict[str, dict[str, str]]] = json.loads(
        (DOCS / "measured.json").read_text(encoding="utf-8")
    )
    return data


def _off(result: str) -> str:
    return f"`{result}`" if result.isidentifier() else f"off by {result}"


def _patches() -> str:
    titles = ("patch", "what it does", "DeepSpeed", "upstream", "remove it when")
    rows = [
        (
            f"[`{name}`](patches/{name}.md)",
            patch.summary,
            f"`{patch.supported}`",
            _upstream(patch),
            patch.remove_when,
        )
        for name, patch in registry.patches().items()
    ]
    return _table(titles, rows)


def _words() -> str:
    """Return a row for each small word of the first column."""
    used = {name for defect in DEFECTS for name in defect.needs.split()}
    rows = [
        (name, " or ".join(f"`{place.partition('=')[0]}`" for place in places))
        for name, places in SETTINGS.items()
        if name in used
    ]
    return _table(("word", "what it is"), [*rows, *SCRIPT_ACTIONS.items()])


def _readme() -> str:
    """Return the README up to its list of pages, which the site's menu has."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return (
        text.partition("\n## Read on")[0]
        .replace("](docs/index.md", "](")
        .replace("](docs/", "](")
        .strip()
    )


if __name__ == "__main__":
    main()
