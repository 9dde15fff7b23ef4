"""docs/models.md: what models of `transformers` come to on a release, stock and patched."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version as version_of

from tests.models.trained import WORK, is_right, told
from tests.models.zoo import MODELS
from tests.world import World
from tools.releases import ROOT, install_one, page, say
from tools.releases.record import stamp
from tools.releases.run import environment

PAGE = ROOT / "docs" / "models.md"
CASES = [(work, stage) for work, task in WORK.items() for stage in task.stages]
#: Stock and patched.
SIDES = (False, True)
#: By model, work, stage and side: how far off, or an error.
Found = Mapping[tuple[str, str, int, bool], str | float]


def models(versions: Sequence[str]) -> int:
    """Train all of them on these releases, and write their columns; 1 if patched is not right."""
    bad = False
    for version in versions:
        if not install_one(version):
            return 1
        results = measured(version)
        for (*case, patched), what in results.items():
            if patched and not is_right(what):
                bad = True
                say(f"{version}: {case}: {what}")
        packages = " ".join(f"{name} {version_of(name)}," for name in ("transformers", "torch"))
        on = {page.ON: f"{packages} {stamp()}"}
        of_models = {name: of_model(results, name) for name in MODELS}
        page.write_column(PAGE, "models", version, of_models | on, [*MODELS])
        of_work = {f"{work}, ZeRO {stage}": of_case(results, work, stage) for work, stage in CASES}
        page.write_column(PAGE, "ways", version, of_work, [*of_work])
    return int(bad)


def measured(version: str) -> Found:
    results = {}
    for side in SIDES:
        with World(variables=environment(version)) as ranks:
            for name in MODELS:
                for work, stage in CASES:
                    case = (name, work, stage, side)
                    results[case] = told(ranks, *case)
                say(f"{version} {'patched' if side else 'stock'}: {name}")
    return results


def of_model(results: Found, name: str) -> str:
    """For stock and patched: what goes wrong, and at which stages."""
    sides = []
    for side in SIDES:
        wrong = defaultdict(list)
        for work, stage in CASES:
            if not is_right(results[name, work, stage, side]):
                wrong[work].append(str(stage))
        parts = (f"{work} {' '.join(stages)}" for work, stages in wrong.items())
        sides.append(", ".join(parts) or "right")
    return two(sides)


def of_case(results: Found, work: str, stage: int) -> str:
    """For stock and patched: how far the models are off that are, and who raises what."""
    sides = []
    for side in SIDES:
        of = [results[name, work, stage, side] for name in MODELS]
        errors = [what.partition(":")[0] for what in of if isinstance(what, str)]
        off = [what for what in of if not isinstance(what, str) and not is_right(what)]
        parts = [f"off by {min(off):.1g} to {max(off):.1g} ({len(off)})"] if off else []
        parts += [f"{error} ({errors.count(error)})" for error in dict.fromkeys(errors)]
        sides.append(", ".join(parts) or "right")
    return two(sides)


def two(sides: Iterable[str]) -> str:
    """Join both sides; a patched one that is not right is in bold."""
    stock, patched = sides
    return f"{stock}; {patched if patched == 'right' else f'**{patched}**'}"
