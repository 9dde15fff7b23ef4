"""The processes that scripts run in: stock's have never had a patch applied."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field

from tests.scripts import measured
from tests.scripts.declared import DEEPCOMPILE, Script
from tests.scripts.measured import PATCHED, STOCK, Measured
from tests.world import World

#: Where ranks that do not meet would wait for good.
SECONDS = 90.0

Kind = tuple[str, int, bool]


@dataclass
class Worlds:
    """Started by the first script that needs one: by way, ranks, and whether Dynamo changes."""

    of: dict[Kind, World] = field(default_factory=dict)

    def world(self, script: Script, way: str, ranks: int) -> World:
        kind = (way, ranks, script.on == DEEPCOMPILE)
        return self.of.setdefault(kind, World(ranks))

    def run(self, script: Script, stage: int, way: str, ranks: int = 2) -> list[Measured]:
        """What each rank saw of it."""
        case = (script.reference, stage, way)
        with tempfile.TemporaryDirectory() as folder:
            if script.before is not None:
                other = {STOCK: PATCHED, PATCHED: STOCK}[way]
                world = self.world(script, other, ranks)
                world.within(SECONDS).run(measured.prepare, script.reference, stage, other, folder)
            return list(
                self.world(script, way, ranks).within(SECONDS).run(measured.measure, *case, folder)
            )

    def close(self) -> None:
        for world in self.of.values():
            world.close()
