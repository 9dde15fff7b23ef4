"""`doctor`: the environment, what would be applied and why not, and trials."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from ds_patches.commands import symptoms
from ds_patches.core import columns, flags, gate, registry, release, shape
from ds_patches.core.gate import Verdict
from ds_patches.core.patch import Patch
from ds_patches.core.state import State
from ds_patches.doctor import locks
from ds_patches.startup import diagnosis

_PACKAGES = ("ds-patches", "torch", "wrapt", "packaging")


def finds_nothing(*, train_check: bool, seconds: float) -> bool:
    """Print the whole picture, and with it the trial if it is asked for.

    Returns whether nothing is wrong: no patch that is wanted is broken or would be refused for
    drift, and the trial has not failed.
    """
    text, refused = report()
    print(text, "", "start-up", *(f"  {line}" for line in diagnosis.lines()), sep="\n")
    if found := locks.lines(os.environ):
        _say(f"warning: {line}" for line in found)
    sound = [not refused]
    if train_check:
        sound.append(_trains(seconds))
    return all(sound)


def report() -> tuple[str, bool]:
    """Return environment, patches and what the release gets wrong as text.

    And whether a patch that is wanted is broken, or drift would keep it from applying.
    """
    patches = registry.patches()
    requests = flags.read(patches)
    facts = [("python", platform.python_version()), ("platform", platform.platform())]
    facts += [(name, _version(name)) for name in _PACKAGES]
    facts.insert(3, (release.PACKAGE, release.told()))
    facts += sorted((k, v) for k, v in os.environ.items() if k.startswith(flags.PREFIX))
    lines = ["environment", *(f"  {line}" for line in columns.aligned(facts)), "", "patches"]
    refused = False
    answers: dict[str, str] = {}
    treated_as: Version | None = None
    for name, patch in patches.items():
        request = requests.of[name]
        verdict = gate.check(patch, request.force)
        treated_as = verdict.release or treated_as
        refused |= request.wanted and verdict.state in (State.BROKEN, State.SHAPE_CHANGED)
        disabled = "" if request.wanted else f"disabled ({request.why})"
        lines += _diagnosis(patch, verdict, disabled)
        answers[name] = disabled or ("" if verdict.may_apply else verdict.state.value)
    if treated_as:
        lines += ["", *symptoms.lines(treated_as, answers)]
    return "\n".join(lines), refused


def _trains(seconds: float) -> bool:
    from ds_patches.traincheck import doctor

    trial = doctor.Diagnosis(os.environ, seconds)
    _say(trial.lines())
    return trial.trains


def _say(lines: Iterable[str]) -> None:
    """Print a paragraph line by line, as they come."""
    print(flush=True)
    for line in lines:
        print(line, flush=True)


def _diagnosis(patch: Patch, verdict: Verdict, disabled: str) -> list[str]:
    answer = "would apply" if verdict.may_apply else f"would not apply, {verdict.state.value}"
    lines = [f"  {patch.name}: {disabled or answer}"]
    lines.append(f"    {patch.summary}")
    if not verdict.drift:
        lines.append(f"    {verdict.reason}")
    for drift in verdict.drift:
        lines.append(f"    drift: {drift.place.key}" + f" ({drift.origin})" * bool(drift.origin))
        lines.append(f"      found {drift.found}")
        spans = shape.known(patch).get(drift.place.key, {})
        lines += [f"      known {digest}  {releases}" for digest, releases in spans.items()]
    return lines


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
