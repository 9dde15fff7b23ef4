"""`status`: a line for each patch, or all there is to say of one."""

from __future__ import annotations

from collections.abc import Iterable

from ds_patches.core import columns, flags, registry
from ds_patches.core.state import PatchStatus, State

_GREEN, _YELLOW, _RED, _PLAIN = "\033[32m", "\033[33m", "\033[31m", "\033[0m"
_GOOD = (State.READY, State.APPLIED, State.FIXED_UPSTREAM)
_BAD = (State.BROKEN, State.SHAPE_CHANGED, State.BLOCKED, State.FAILED)


def in_short(statuses: Iterable[PatchStatus], *, colour: bool = False) -> str:
    """Return a line for each patch: name, state, why, and the options that were chosen."""
    found = list(statuses)
    rows = [(s.name, s.state.value, "  ".join([s.brief, *_chosen(s)])) for s in found]
    lines = columns.aligned(rows)
    if colour:
        lines = [_painted(line, s.state) for line, s in zip(lines, found, strict=True)]
    return "\n".join(lines)


def in_full(status: PatchStatus) -> str:
    """Return a paragraph on one patch."""
    unasked = flags.defaults(registry.patch(status.name))
    here = f"{status.brief}; " if status.state is State.READY else ""
    rows = [("state", status.state.value), ("why", here + status.reason)]
    rows.append(("DeepSpeed", status.installed or "not installed"))
    rows += [("requires", name) for name in registry.patch(status.name).requires]
    rows += [
        ("option", f"{name}={value}" + " (default)" * (value == unasked[name]))
        for name, value in status.options.items()
    ]
    rows += [("target", f"{key} is {where.value}") for key, where in status.targets.items()]
    rows += [("note", note) for note in status.notes]
    rows += [("upstream", f"{link.label}, {link.url}") for link in status.upstream]
    title = f"{status.name}: {registry.patch(status.name).summary}"
    return "\n".join([title, *(f"  {line}" for line in columns.aligned(rows))])


def _chosen(status: PatchStatus) -> list[str]:
    """Return the options that are not what they are by themselves."""
    unasked = flags.defaults(registry.patch(status.name))
    return [f"{name}={value}" for name, value in status.options.items() if value != unasked[name]]


def _painted(line: str, state: State) -> str:
    paint = _GREEN if state in _GOOD else _RED if state in _BAD else _YELLOW
    return line.replace(f"  {state.value}  ", f"  {paint}{state.value}{_PLAIN}  ", 1)
