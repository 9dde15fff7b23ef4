"""The sections of docs/troubleshooting.md, to read on."""

from __future__ import annotations

import re
from pathlib import Path

from ds_patches.core import files


def page() -> Path:
    """Return the page of all sections: in a wheel it is in the package, in a checkout in docs."""
    package = Path(__file__).parents[1]
    places = (package / "troubleshooting.md", package.parent / "docs/troubleshooting.md")
    return next((place for place in places if place.exists()), places[0])


def titles() -> dict[str, str]:
    """Return the title of each section, by its anchor."""
    found = re.findall(r"^####? (.+) { #(\S+) }$", files.text(page()), re.MULTILINE)
    return {anchor: title for title, anchor in found}


def section(anchor: str) -> str:
    text = files.text(page())
    found = re.search(rf"^####? .+{{ #{anchor} }}\n(?:(?!^##).*\n?)*", text, re.MULTILINE)
    return found[0].replace(f" {{ #{anchor} }}", "") if found else ""
