"""`status NAME`: all details of one patch."""

from ds_patches.core import columns, registry
from ds_patches.core.state import PatchStatus, State


def in_full(status: PatchStatus) -> str:
    """Return a paragraph with the patch's state, reason, targets, notes and links."""
    patch = registry.patch(status.name)
    brief = f"{status.brief}; " if status.state is State.READY else ""
    rows = [("state", status.state.value), ("why", brief + status.reason)]
    rows.append(("DeepSpeed", status.installed or "not installed"))
    rows += [("requires", name) for name in patch.requires]
    rows += [("target", f"{key} is {state.value}") for key, state in status.targets.items()]
    rows += [("note", note) for note in status.notes]
    rows += [("upstream", f"{link.label}, {link.url}") for link in status.upstream]
    lines = (f"  {line}" for line in columns.aligned(rows))
    return "\n".join([f"{status.name}: {patch.summary}", *lines])
