"""What the command line prints. Plain aligned text; colour only on a terminal."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from ds_patches.core import flags, gate, registry, release, shape
from ds_patches.core.gate import Verdict
from ds_patches.core.patch import Patch
from ds_patches.core.state import PatchStatus, State

_GREEN, _YELLOW, _RED, _PLAIN = "\033[32m", "\033[33m", "\033[31m", "\033[0m"
_COLOURS = {
    State.READY: _GREEN,
    State.APPLIED: _GREEN,
    State.FIXED_UPSTREAM: _GREEN,
    State.SHAPE_CHANGED: _RED,
    State.FAILED: _RED,
}
_PACKAGES = ("ds-patches", "torch", "wrapt", "packaging")


def status(statuses: Iterable[PatchStatus], *, colour: bool = False) -> str:
    """Return one line per patch: name, state, release, why, chosen options, links; notes below."""
    found, patches = list(statuses), registry.patches()
    heads = _aligned([(s.name, s.state.value, s.installed or "-") for s in found])
    lines = []
    for one, head in zip(found, heads, strict=True):
        if colour:
            paint = _COLOURS.get(one.state, _YELLOW)
            head = head.replace(f" {one.state.value} ", f" {paint}{one.state.value}{_PLAIN} ", 1)
        links = (link.url for link in one.upstream)
        lines.append("  ".join([head, _why(one), *_chosen(one, patches[one.name]), *links]))
        lines += [f"  note: {note}" for note in one.notes]
    return "\n".join(lines)


def doctor() -> tuple[str, bool]:
    """Return the whole picture as text, and whether drift would keep a patch from applying."""
    patches = registry.patches()
    wishes = flags.read(patches)
    facts = [("python", platform.python_version()), ("platform", platform.platform())]
    facts += [(name, _version(name)) for name in _PACKAGES]
    facts.insert(3, (release.PACKAGE, _deepspeed()))
    facts += sorted((k, v) for k, v in os.environ.items() if k.startswith(flags.PREFIX))
    lines = ["environment", *(f"  {line}".rstrip() for line in _aligned(facts)), "", "patches"]
    refused = False
    for name, patch in patches.items():
        wish = wishes.of[name]
        verdict = gate.check(patch, wish.force)
        refused |= wish.wanted and verdict.state is State.SHAPE_CHANGED
        lines += _diagnosis(patch, verdict, "" if wish.wanted else wish.why)
    return "\n".join(lines), refused


def table() -> str:
    """Return the patches as a markdown table, from the registry alone."""
    titles = ("patch", "what it does", "DeepSpeed", "upstream", "remove it when")
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for patch in registry.patches().values():
        links = ", ".join(f"[{link.label}]({link.url})" for link in patch.upstream)
        name, supported = f"`{patch.name}`", f"`{patch.supported}`"
        rows.append(f"| {name} | {patch.summary} | {supported} | {links} | {patch.remove_when} |")
    return "\n".join(rows)


def _why(status: PatchStatus) -> str:
    if status.state is State.READY:
        return f"not applied in this process; {status.reason}"
    return status.reason


def _chosen(status: PatchStatus, patch: Patch) -> list[str]:
    """Return the options that are not what they are by themselves."""
    defaults = flags.defaults(patch)
    return [f"{name}={v}" for name, v in status.options.items() if v != defaults[name]]


def _diagnosis(patch: Patch, verdict: Verdict, disabled: str) -> list[str]:
    answer = "would apply" if verdict.may_apply else f"would not apply, {verdict.state.value}"
    lines = [f"  {patch.name}: {f'disabled ({disabled})' if disabled else answer}"]
    lines.append(f"    {patch.summary}")
    if not verdict.drift:
        lines.append(f"    {verdict.reason}")
    for drift in verdict.drift:
        lines.append(f"    drift: {drift.place.key}" + f" ({drift.origin})" * bool(drift.origin))
        lines.append(f"      found {drift.found}")
        spans = shape.known(patch).get(drift.place.key, {})
        lines += [f"      known {digest}  {releases}" for digest, releases in spans.items()]
    return lines


def _deepspeed() -> str:
    """Return the release that would be imported; metadata may lie around of another one."""
    installed = release.installed()
    return installed.text if installed else "not installed"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return each row as a line, its columns as wide as the widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (zip(row, widths, strict=True) for row in rows)
    return ["  ".join(cell.ljust(width) for cell, width in row) for row in padded]
