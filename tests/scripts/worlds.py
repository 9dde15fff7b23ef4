"""The processes that scripts run in: stock's have never had a patch applied."""

import tempfile
from dataclasses import dataclass, field
from typing import Any

import ds_patches
from tests.harness import DEEPCOMPILE, EAGER, Options, Outcome, World, make_trainer, measure, models
from tests.scripts.declared import Script

STOCK, PATCHED = "stock", "patched"
#: Where ranks that do not meet would wait for good.
SECONDS = 90.0
#: ZeRO-3 keeps nothing for its next use and gathers nothing ahead: what else it holds is seen.
FRUGAL = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}

Kind = tuple[str, int, bool]


@dataclass
class Worlds:
    """Started by the first script that needs one: by way, ranks, and whether Dynamo changes."""

    of: dict[Kind, World] = field(default_factory=dict)

    def world(self, script: Script, way: str, ranks: int) -> World:
        kind = (way, ranks, script.on == DEEPCOMPILE)
        return self.of.setdefault(kind, World(ranks)).within(SECONDS)

    def run(
        self,
        script: Script,
        stage: int,
        way: str,
        ranks: int = 2,
        looks: bool = True,
        **options: Any,
    ) -> list[Outcome]:
        """Return the outcome of each rank.

        looks: at more than values, too. options: in place of those that it declares.
        """
        changed = {"grid": ranks == 4, "zero": FRUGAL | dict(script.options.zero), **options}
        wanted = script.at(stage, **changed)
        with tempfile.TemporaryDirectory() as folder:
            if script.before is not None:
                other = {STOCK: PATCHED, PATCHED: STOCK}[way]
                self.world(script, other, ranks).run(prepare, script, wanted, other, folder)
            outcomes = self.world(script, way, ranks).run(train, script, wanted, way, folder, looks)
            return list(outcomes)

    def close(self) -> None:
        for world in self.of.values():
            world.close()


def train(script: Script, options: Options, way: str, folder: str, looks: bool) -> Outcome:
    _be(way)
    aspects = ["calls"]
    if options.stage == 3 and script.on == EAGER and script.before is None:
        aspects.append("memory")
    return measure(
        script,
        options,
        on=script.on,
        tolerance=script.tolerance,
        strict=False,
        before=script.before,
        folder=folder,
        looks=aspects if looks else [],
    )


def prepare(script: Script, options: Options, way: str, folder: str) -> None:
    """Run what another process does before a script."""
    _be(way)
    assert script.before is not None
    start = models.build(options.model, options.torch_dtype)
    script.before(make_trainer(start, options, strict=False, folder=folder))


def _be(way: str) -> None:
    """Apply every patch, or assert that none is applied; a process is one or the other."""
    if way == PATCHED:
        ds_patches.apply_all()
    live = [name for name in ds_patches.names() if ds_patches.is_applied(name)]
    assert bool(live) == (way == PATCHED), live
