"""The patches as a markdown table, for the site."""

from __future__ import annotations

from ds_patches.core import registry


def markdown() -> str:
    """Return the table, from the registry alone."""
    titles = ("patch", "what it does", "DeepSpeed", "upstream", "remove it when")
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for patch in registry.patches().values():
        links = ", ".join(f"[{link.label}]({link.url})" for link in patch.upstream)
        name, supported = f"`{patch.name}`", f"`{patch.supported}`"
        rows.append(f"| {name} | {patch.summary} | {supported} | {links} | {patch.remove_when} |")
    return "\n".join(rows)
