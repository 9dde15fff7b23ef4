"""Do no harm: what a patched run owes a stock one.

- values: where stock is right, patched is right. Where stock raises or is silently wrong, patched
  is right, or refuses in words that the script declares, or warns as it declares.
- words: where patched is right, it warns of nothing.
- memory, ZeRO-3: patched gathers no more than stock, at most and after each backward.
- calls: where stock is right and no patch has a part in a script, a step calls at most 1 % more
  Python functions than stock's does, or `A_STEP` more, `A_FORWARD` for each of its forwards and
  `A_REDUCTION` for each reduction: far less than stock's own calls for one parameter.
"""

import re

from ds_patches.core.errors import DsPatchesError
from tests.harness.run import Outcome
from tests.scripts.declared import RAISES, RIGHT, WRONG, Script, raises


def _below(kind: type) -> set[str]:
    return {kind.__name__}.union(*map(_below, kind.__subclasses__()))


#: The errors of ours, by which a script is refused.
OURS = _below(DsPatchesError)
#: Of stock's Python calls in a step, what patches may add ...
CALLS = 0.01
#: ... or for each step, with a ``GatheredParameters`` in it ...
A_STEP = 30
#: ... and each forward, with its backward and its part of a step: 59 are measured, whatever the
#: model ...
A_FORWARD = 75
#: ... and for each reduction of a bucket, of which DeepSpeed's own default needs few.
A_REDUCTION = 3


def verdict(ranks: list[Outcome]) -> str:
    """Return the verdict of all ranks together."""
    if errors := [outcome.error for outcome in ranks if outcome.error]:
        return raises(errors[0])
    return RIGHT if all(outcome.equal and not outcome.races for outcome in ranks) else WRONG


def agrees(declared: str, actual: str) -> bool:
    """Return True if stock's verdict is the declared one."""
    if declared.startswith(RAISES):
        return actual.startswith(RAISES) and declared[len(RAISES) + 2 : -1] in actual
    return declared == actual


def complaints(
    script: Script, stage: int, stock: list[Outcome], patched: list[Outcome]
) -> list[str]:
    """Where stock is not as declared; else what does not hold of the law, in words."""
    declared, actual = script.stock[stage], verdict(stock)
    if not agrees(declared, actual):
        because = f": {why(stock)}" if actual == WRONG else ""
        return [f"stock is said to be {declared}, and is {actual}{because}"]
    broken = {
        "values": harm(script, stock, patched),
        "words": "" if script.warns == RIGHT else _words(patched),
        "memory": _memory(stock, patched),
        "calls": "" if stage in script.costs else _calls(script, stock, patched),
    }
    return [f"{kind}: {text}" for kind, text in broken.items() if text]


def harm(
    script: Script, stock: list[Outcome], patched: list[Outcome], crossed: bool = False
) -> str:
    """Return in words what is wrong with patched values, or "".

    crossed: with options, so that nothing is declared. Where stock raises, patched is right, raises
    the same, or refuses by an error of its own class.
    """
    before, after = verdict(stock), verdict(patched)
    refuses = script.refusal and after.startswith(RAISES) and re.search(script.refusal, after)
    warns = script.warns == before == after == WRONG and all(outcome.said for outcome in patched)
    errors = [outcome.error for outcome in patched if outcome.error]
    fails = crossed and before.startswith(RAISES) and errors
    ours = fails and all(error.partition(":")[0] in OURS for error in errors)
    excused = ours or (crossed and same(stock, patched)) or (before != RIGHT and (refuses or warns))
    if after == RIGHT or excused:
        return ""
    return f"stock is {before}, patched {after}: {why(patched)}"


def same(stock: list[Outcome], patched: list[Outcome]) -> bool:
    """Return True if both raise the same."""
    return bool(_gist(stock)) and _gist(stock) == _gist(patched)


def _gist(ranks: list[Outcome]) -> str:
    """Return the class and first words of the first error, without numbers."""
    error = next((outcome.error for outcome in ranks if outcome.error), "")
    return re.sub(r"\d+", "#", error)[:80]


def _words(patched: list[Outcome]) -> str:
    warnings = [words for outcome in patched for words in outcome.said]
    is_right = verdict(patched) == RIGHT
    return f"patched is right, and says: {warnings[0]}" if warnings and is_right else ""


def why(ranks: list[Outcome]) -> str:
    """The worst of a run that did not end well, in a few words."""
    worst = max(ranks, key=lambda outcome: outcome.difference)
    if races := [race for outcome in ranks for race in outcome.races]:
        return f"{len(races)} races, such as {races[0]}"
    return f"off by {worst.difference:.1e} in {worst.where}, of {worst.moved:.1e}"


def _memory(stock: list[Outcome], patched: list[Outcome]) -> str:
    right = verdict(stock) == RIGHT
    for before, after in zip(stock, patched, strict=True):
        if right and any(ours > its for ours, its in zip(after.peaks, before.peaks, strict=False)):
            return f"elements gathered: stock {before.peaks}, patched {after.peaks}"
        allowed = before.left if right else [[] for _ in after.left]
        for index, (ours, stocks) in enumerate(zip(after.left, allowed, strict=False)):
            if more := {*ours} - {*stocks}:
                return f"after backward {index} still gathered: {', '.join(sorted(more))}"
    return ""


def _calls(script: Script, stock: list[Outcome], patched: list[Outcome]) -> str:
    if script.at_rest and verdict(stock) == verdict(patched) == RIGHT:
        for before, after in zip(stock, patched, strict=True):
            few = A_STEP + A_FORWARD * after.forwards + A_REDUCTION * after.reductions
            if after.calls - before.calls > max(CALLS * before.calls, few):
                return f"{after.calls} Python calls in a step, stock's are {before.calls}"
    return ""
